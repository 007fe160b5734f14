"""Time limits, and the steps that are traced."""

from __future__ import annotations

import re
from typing import Annotated

from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, flag, rule

_MOST_TRACED = 100


class TimeLimits(Flags):
    """Time limits of a run; the loop, grading and the watchdog read them."""

    reward_timeout: Annotated[float | None, Above(0, use=300)] = flag(
        None,
        "Time limit in seconds for one reward function on one rank's share of a rollout. If a function exceeds it, the "
        "run ends with an error that names the function. Default: none, only --phase_timeout applies.",
        example="300",
    )
    phase_timeout: Annotated[float, AtLeast(0, use=0, why="0 is no limit")] = flag(
        3600.0,
        "Time limit in seconds, on every rank, for one phase of a step (generation, grading, training, "
        "...) and for the work between two phases (checkpoints, callbacks). If a rank exceeds it, every rank "
        "writes its Python stacks and unfinished collectives to stuck-<time>.txt in --output_dir, and the run "
        "ends. 0: no limit. Default: 3600.",
        example="7200",
    )
    node_timeout: Annotated[float, AtLeast(0, use=300, why="0 is no limit")] = flag(
        300.0,
        "Time in seconds after which a machine that does not answer is lost, with several machines under torchrun. The "
        "run then ends on all others, with a line that names the machine and the checkpoint to continue from. A line "
        "names the machine after 30 s. 0: no limit. Default: 300.",
        example="120",
    )
    stop_grace: Annotated[float, Above(0, use=120, why="a cluster waits that long between SIGTERM and SIGKILL")] = flag(
        120.0,
        "Time in seconds between SIGTERM or SIGINT and the end of all processes; set it to what a cluster waits before "
        "it sends SIGKILL. On either signal the run ends the current step, saves a checkpoint and exits with 143 or "
        "130. A step in which completions are still generated or graded after half of this time is given up, and the "
        "checkpoint is that of the step before. A second signal ends the run at once. Default: 120.",
        example="60",
    )

    @rule
    def a_reward_ends_before_its_phase(self) -> Faults:
        if self.reward_timeout is not None and 0 < self.phase_timeout <= self.reward_timeout:
            yield (
                f"--reward_timeout {self.reward_timeout:g} must be below --phase_timeout {self.phase_timeout:g}, which "
                f"would end the run first; use --phase_timeout {2 * self.reward_timeout:g}, or 0 for no limit"
            )


class Trace(Flags):
    """The optimizer steps that the loop traces."""

    trace_steps: str | None = flag(
        None,
        "Optimizer steps to trace, such as 3 or 3-5: trace.json in --output_dir then has the phases of all "
        "ranks and the requests of all servers on one time line, for https://ui.perfetto.dev. Default: none.",
        example="3-5",
    )
    train_iters: int | None
    rollout_only: bool

    @rule
    def the_steps_are_trained(self) -> Faults:
        if self.steps is None:
            return
        first, last = self.steps
        text = f"--trace_steps {self.trace_steps}"
        if not 1 <= first <= last:
            yield f"{text} must be a step or a range of steps, from 1 on; use --trace_steps 3-5"
        elif last - first >= _MOST_TRACED:
            yield (
                f"{text} are {last - first + 1} steps, and a trace has at most {_MOST_TRACED}; use --trace_steps "
                f"{first}-{first + _MOST_TRACED - 1}"
            )
        elif self.train_iters is not None and first > self.train_iters:
            use = max(self.train_iters - 1, 1)
            yield f"{text} begins after the last step ({self.train_iters}); use --trace_steps {use}"
        if self.rollout_only:
            yield f"{text}: --rollout_only true has no steps of training; leave --trace_steps out"

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step; None: none. (0, 0) if the text is neither a step nor a range."""
        if self.trace_steps is None:
            return None
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", self.trace_steps.strip())
        return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)

"""The pace of a run and the time that is left, without start-up; and the status line of a terminal."""

from __future__ import annotations

from collections import deque

from swift_megatron_grpo.output.console.lines import duration

_WINDOW = 20  # rollouts
_BAR = 24


class Pace:
    """The mean time of a step, over the newest steps and without the first rollout.

    That one includes what a run does once: it captures graphs, compiles kernels and verifies all weights.
    """

    def __init__(self, step: int, total: int, now: float, steps_per_rollout: int = 1) -> None:
        self._total, self._start, self._step = total, step, step
        self._last = now
        self._per_rollout = steps_per_rollout
        # Whole rollouts: the first step of each also generates.
        self._times: deque[float] = deque(maxlen=_WINDOW * steps_per_rollout)

    def finish(self, step: int, now: float) -> None:
        """Note the end of a step, or of several at once."""
        count = step - self._step
        if count <= 0:
            return
        each, self._last = (now - self._last) / count, now
        for done in range(self._step + 1, step + 1):
            if done > self._start + self._per_rollout:
                self._times.append(each)
        self._step = step

    @property
    def seconds_per_step(self) -> float | None:
        """None until the steps of the second rollout have ended."""
        return sum(self._times) / len(self._times) if len(self._times) >= self._per_rollout else None

    @property
    def remaining(self) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else pace * (self._total - self._step)


def status(step: int, total: int, what: str, elapsed: float, remaining: float | None, width: int) -> str:
    """Return the status line: a bar, the step, the time."""
    full = round(_BAR * step / total) if total else 0
    bar = "█" * full + "░" * (_BAR - full)
    left = "" if remaining is None else f" · {duration(remaining)} left"
    return f"{bar} {step}/{total} · {what} · {duration(elapsed)}{left}"[: max(width - 1, 20)]

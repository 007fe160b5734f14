"""Experts that an engine reports: what no router can have chosen, and how often the trainer's routers agree.

A kernel of vLLM that chooses experts itself may leave the rows of its layers at zero: k times the first expert.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_megatron_grpo.loop.samples import without_routing
from swift_megatron_grpo.packing.routing import ExpertLayers
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import ExpertRows, Rollout, Sample

_ADVICE = "use --router_replay_mode R2 or disabled, and --router_agreement_samples 0"


class WrongExperts(RuntimeError):
    """An engine reports experts that its routers cannot have chosen."""


def check_experts(rollouts: Iterable[Rollout], layers: ExpertLayers) -> None:
    """Raise WrongExperts for the first completion whose experts cannot be those of this model's routers."""
    for rollout in rollouts:
        problem = None if rollout.routed_experts is None else problem_of_rows(rollout.routed_experts, layers)
        if problem is not None:
            raise WrongExperts(f"a completion of prompt {rollout.prompt.prompt_id}: vLLM {problem}; {_ADVICE}")


def problem_of_rows(rows: ExpertRows, layers: ExpertLayers) -> str | None:
    """Return what is wrong with the rows [t - 1, layers, k] of a completion; None: a router may have chosen them."""
    if rows.shape[1:] != (layers.num_layers, layers.k):
        reported, k = rows.shape[1:]
        return f"reports experts of {reported} layers and {k} per token, not {layers.num_layers} and {layers.k}"
    chosen = rows[:, list(layers.with_experts)]  # [t - 1, layers with experts, k]
    if not chosen.size:
        return None
    if int(chosen.max()) >= layers.experts:
        return f"reports the expert {int(chosen.max())}, and the model has {layers.experts} in a layer"
    if layers.k == 1:  # any expert is a choice
        return None
    zero = ~chosen.any(-1)
    if zero.any():
        layer = layers.with_experts[int(np.argwhere(zero)[0, 1])]
        return (
            f"does not report the experts of layer {layer}: a row of it is zero, so the kernel of its experts chooses "
            "them out of sight; another moe_backend in --vllm_engine_kwargs may report them"
        )
    if (np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any():
        return "reports an expert twice for one token"
    return None


def check_reported(rollouts: Iterable[Rollout], replayed_from_disk: bool) -> None:
    """Raise WrongExperts if no completion of a rollout came with experts, so that R3 would replay nothing."""
    if any(rollout.routed_experts is not None for rollout in rollouts):
        return
    fault = "no completion came with them"
    if replayed_from_disk:
        fault = "the dump of --rollout_replay has none: it was written without --router_replay_mode R3"
    raise WrongExperts(f"--router_replay_mode R3 replays the experts that vLLM chose, and {fault}; use R2 or disabled")


@dataclass(frozen=True)
class RouterAgreement:
    """Measures `rollout/router_agreement` on some completions of every rollout. Every rank calls `measure`.

    It is the share of choices in which the trainer's routers and vLLM's chose the same experts. A choice is made for
    one token in one layer: k experts, in any order. Nothing is replayed in the pass that measures it.
    """

    passes: Passes
    coordinator: Coordinator
    completions: int

    def measure(self, samples: Sequence[Sample], engine: Sequence[ExpertRows | None]) -> float | None:
        """Return the share of equal choices; None: the engine has reported none. `engine`: rows of each sample."""
        fewest = self.passes.fewest_samples
        wanted = -(-self.completions // fewest) * fewest
        some = without_routing(samples[: min(wanted, len(samples) // fewest * fewest)])
        _, trainer = self.passes.infer_and_record(some)
        position = self.passes.parallel
        same = total = 0
        if position.tp_rank == 0 and position.cp_rank == 0:  # one of the ranks that hold copies
            for index, rows in trainer.items():
                if (reported := engine[index]) is not None:
                    equal = equal_choices(rows, reported, some[index].completion_mask)
                    same += int(equal.sum())
                    total += equal.size
        gathered = self.coordinator.all_gather((same, total))
        same, total = (sum(values) for values in zip(*gathered, strict=True))
        return same / total if total else None


def equal_choices(trainer: ExpertRows, engine: ExpertRows, sampled: Sequence[bool]) -> NDArray[np.bool_]:
    """Return True for each equal choice, [sampled tokens with a row, layers with experts on this rank].

    `trainer`: [t, layers, k], -1 in layers of other ranks. `engine`: [t - 1, layers, k] or fewer rows.
    """
    layers = np.flatnonzero(trainer[0, :, 0] >= 0)
    rows = np.flatnonzero(np.asarray(sampled[: len(engine)]))
    ours, theirs = (np.sort(choices[rows][:, layers].astype(np.int32)) for choices in (trainer, engine))
    equal: NDArray[np.bool_] = (ours == theirs).all(-1)
    return equal

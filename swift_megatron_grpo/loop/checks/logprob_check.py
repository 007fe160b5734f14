"""Comparison of the engine's log-probs of the first rollout with the trainer's, or of all with predicted drafts.

The engine reports log-probs while it samples, which is not the path that the weight sync verifies. They may belong to
the neighbouring token, and they are of the distribution that was sampled, which top-p, top-k and a repetition penalty
change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

import numpy as np

from swift_megatron_grpo.loop.bodies import Bodies
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import Quantization, Sample

logger = logging.getLogger(__name__)
COMPLETIONS = 64  # are enough
SHIFTS = (0, -1, 1)  # the engine's value at t is compared with the trainer's at t + shift


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """The difference between the engine's log-probs and the trainer's, as sums over tokens, which add up over ranks."""

    signed: float = 0.0  # engine - trainer
    absolute: tuple[float, ...] = (0.0,) * len(SHIFTS)  # |engine - trainer|, for each shift
    pairs: tuple[int, ...] = (0,) * len(SHIFTS)

    @classmethod
    def of(cls, engine: Sequence[float], trainer: Sequence[float]) -> LogprobGap:
        ours, theirs = np.asarray(engine), np.asarray(trainer)
        shifted = [ours - theirs, ours[1:] - theirs[:-1], ours[:-1] - theirs[1:]]
        absolute = tuple(float(np.abs(gaps).sum()) for gaps in shifted)
        return cls(float(shifted[0].sum()), absolute, tuple(map(len, shifted)))

    def __add__(self, other: LogprobGap) -> LogprobGap:
        return LogprobGap(
            self.signed + other.signed,
            tuple(map(add, self.absolute, other.absolute)),
            tuple(map(add, self.pairs, other.pairs)),
        )

    @property
    def tokens(self) -> int:
        return self.pairs[0]

    @property
    def means(self) -> tuple[float, ...]:
        """Mean |engine - trainer| per token, for each shift."""
        return tuple(total / max(pairs, 1) for total, pairs in zip(self.absolute, self.pairs, strict=True))


@dataclass(frozen=True)
class LogprobCheck:
    """Raises for a gap that no setting explains, and warns of one that a setting causes. Every rank calls `check`."""

    passes: Passes
    at_temperature_1: Passes
    coordinator: Coordinator
    sampling: SamplingConfig
    quantization: Quantization
    bodies: Bodies | None = None  # None: every rank has the tokens of all completions
    stops_at_a_gap: bool = False  # vLLM may keep states of wrong drafts

    def check(self, samples: Sequence[Sample], rounding: float) -> None:
        """Compare some samples. `rounding`: the mean absolute difference between log-probs of the same weights."""
        gap = self._measure_gap(self.passes, samples)
        check_alignment(gap, rounding)
        at_temperature_1 = partial(self._measure_gap, self.at_temperature_1, samples)
        warning = distortion_warning(gap, at_temperature_1, self.sampling, rounding, self.quantization)
        if warning is not None and self.stops_at_a_gap:
            raise WrongStates(
                f"{warning}. With --speculative_rollouts mtp vLLM may have continued from states of wrong drafts; "
                "use --speculative_rollouts off, or another version of vLLM"
            )
        if warning is not None and self.coordinator.rank == 0:
            logger.warning(warning)

    def _with_tokens(self, sample: Sample) -> Sample:
        return sample if self.bodies is None else self.bodies.with_tokens(sample)

    def _measure_gap(self, passes: Passes, samples: Sequence[Sample]) -> LogprobGap:
        fewest = passes.fewest_samples
        some = samples[: min(len(samples), max(COMPLETIONS, fewest)) // fewest * fewest]
        position = passes.parallel
        values = passes.infer(some) if some else {}
        gap = LogprobGap()
        if position.tp_rank == 0 and position.cp_rank == 0:  # one of the ranks that hold copies
            for index, trainer in values.items():
                if engine := self._with_tokens(some[index]).rollout_logprobs:
                    gap += LogprobGap.of(engine, trainer.logprobs)
        return sum(self.coordinator.all_gather(gap), LogprobGap())


class WrongStates(RuntimeError):
    """The engine's log-probs of drafted completions are not those of the policy."""


class ShiftedLogprobs(RuntimeError):
    """The engine's log-probs belong to the neighbouring tokens."""


def check_alignment(gap: LogprobGap, rounding: float) -> None:
    """Raise ShiftedLogprobs if the engine's log-probs match the trainer's of the neighbouring tokens."""
    aligned, *others = gap.means
    best = min(others)
    if gap.tokens and aligned > 4 * rounding and best < aligned / 4:
        side = "after" if SHIFTS[1 + others.index(best)] > 0 else "before"
        raise ShiftedLogprobs(
            f"vLLM's log-probs of its completions are shifted by one: they differ by {aligned:.2g} per token from the "
            f"trainer's, but only by {best:.2g} from the trainer's of the token {side}. Rollout corrections and "
            "rollout/ metrics would read the wrong tokens. Use the versions of vLLM and ms-swift that the README "
            "names: in others, the log-probs of a response may not be aligned with its tokens"
        )


def distortion_warning(
    gap: LogprobGap,
    at_temperature_1: Callable[[], LogprobGap],
    sampling: SamplingConfig,
    rounding: float,
    quantization: Quantization = "none",
) -> str | None:
    """Return a warning if the two distributions differ by more than rounding.

    `at_temperature_1`: measures the gap to the trainer's log-probs without --temperature. `quantization`: of the
    engine; the difference that it makes for a fixed text is part of `rounding`.
    """
    mean = gap.means[0]
    penalty = sampling.repetition_penalty
    distorting = [
        (sampling.top_p < 1, f"--top_p {sampling.top_p:g}", "--top_p 1"),
        (sampling.min_p > 0, f"--min_p {sampling.min_p:g}", "--min_p 0"),
        (sampling.top_k > 0, f"--top_k {sampling.top_k}", "--top_k -1"),
        (penalty != 1, f"--repetition_penalty {penalty:g}", "--repetition_penalty 1"),
        (sampling.regex is not None, f"--structured_outputs_regex {sampling.regex}", "no --structured_outputs_regex"),
    ]
    flags = [(typed, neutral) for is_set, typed, neutral in distorting if is_set]
    if not gap.tokens or mean <= (2 if flags else 8) * rounding:
        return None
    observed = (
        f"vLLM's log-probs of its completions differ from the trainer's by {mean:.2g} per token "
        f"({gap.signed / gap.tokens:+.2g} with their sign), but rounding accounts for {rounding:.2g} only"
    )
    if flags:
        return (
            f"{observed}: {' and '.join(flag for flag, _ in flags)} make vLLM sample from another distribution than "
            "the policy's. Training on it is valid, but rollout/ metrics and --rollout_importance_sampling_mode treat "
            f"the difference as rounding; use {' '.join(neutral for _, neutral in flags)} to sample from the policy"
        )
    if sampling.temperature != 1 and (plain := at_temperature_1()).tokens and plain.means[0] < mean / 4:
        return (
            f"{observed}. At temperature 1 they differ by {plain.means[0]:.2g}, so vLLM does not apply "
            f"--temperature {sampling.temperature:g} to them; use --temperature 1"
        )
    possible = "" if quantization == "none" else f" --rollout_quantization {quantization} may, or otherwise"
    return (
        f"{observed}. No sampling flag explains it:{possible} check --vllm_engine_kwargs. "
        "--rollout_importance_sampling_mode corrects for the difference"
    )

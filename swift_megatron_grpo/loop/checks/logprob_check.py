"""Comparison of the engine's log-probs of the first rollout with the trainer's.

The engine reports log-probs while it samples, which is not the path that the weight sync verifies. They may belong to
the neighbouring token, and they are of the distribution that was sampled, which top-p, top-k and a repetition penalty
change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import Quantization, Sample, TokenValues

COMPLETIONS = 64  # are enough
logger = logging.getLogger(__name__)

SHIFTS = (0, -1, 1)  # the engine's value at t is compared with the trainer's at t + shift


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """The difference between the engine's log-probs and the trainer's, as sums over tokens, which add up over ranks."""

    tokens: int = 0
    signed: float = 0.0  # engine - trainer
    absolute: tuple[float, ...] = (0.0,) * len(SHIFTS)  # |engine - trainer|, for each shift
    pairs: tuple[int, ...] = (0,) * len(SHIFTS)

    @classmethod
    def of(cls, engine: Sequence[float], trainer: Sequence[float]) -> LogprobGap:
        """Measure the gap of one completion."""
        shifted = [_pairs(engine, trainer, shift) for shift in SHIFTS]
        return cls(
            tokens=len(engine),
            signed=sum(a - b for a, b in zip(engine, trainer, strict=True)),
            absolute=tuple(sum(abs(a - b) for a, b in pairs) for pairs in shifted),
            pairs=tuple(map(len, shifted)),
        )

    @classmethod
    def sum(cls, gaps: Iterable[LogprobGap]) -> LogprobGap:
        total = cls()
        for gap in gaps:
            total = cls(
                total.tokens + gap.tokens,
                total.signed + gap.signed,
                tuple(a + b for a, b in zip(total.absolute, gap.absolute, strict=True)),
                tuple(a + b for a, b in zip(total.pairs, gap.pairs, strict=True)),
            )
        return total

    @property
    def means(self) -> tuple[float, ...]:
        """Mean |engine - trainer| per token, for each shift."""
        return tuple(total / max(pairs, 1) for total, pairs in zip(self.absolute, self.pairs, strict=True))


class LogprobCheck:
    """Raises for a gap that no setting explains, and warns of one that a setting causes. Every rank calls `check`."""

    def __init__(
        self,
        passes: Passes,
        at_temperature_1: Passes,
        coordinator: Coordinator,
        sampling: SamplingConfig,
        quantization: Quantization = "none",
    ) -> None:
        self._passes = passes
        self._at_temperature_1 = at_temperature_1
        self._coordinator = coordinator
        self._sampling = sampling
        self._quantization = quantization

    def check(self, samples: Sequence[Sample], rounding: float) -> None:
        """Compare some samples. `rounding`: the mean absolute difference between log-probs of the same weights."""
        gap = self._measure_gap(self._passes, samples)
        check_alignment(gap, rounding)
        at_temperature_1 = partial(self._measure_gap, self._at_temperature_1, samples)
        warning = distortion_warning(gap, at_temperature_1, self._sampling, rounding, self._quantization)
        if warning is not None and self._coordinator.rank == 0:
            logger.warning(warning)

    def _measure_gap(self, passes: Passes, samples: Sequence[Sample]) -> LogprobGap:
        fewest = passes.fewest_samples
        some = samples[: min(len(samples), max(COMPLETIONS, fewest)) // fewest * fewest]
        position = passes.parallel
        local = passes.infer(some) if some else {}
        reports = position.tp_rank == 0 and position.cp_rank == 0  # one of the ranks that hold copies
        return LogprobGap.sum(self._coordinator.all_gather(_gap_of_samples(local, some) if reports else LogprobGap()))


def _gap_of_samples(values: Mapping[int, TokenValues], samples: Sequence[Sample]) -> LogprobGap:
    pairs = ((samples[index].rollout_logprobs, trainer.logprobs) for index, trainer in values.items())
    return LogprobGap.sum(LogprobGap.of(engine, trainer) for engine, trainer in pairs if engine)


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
    flags = _distorting_flags(sampling)
    if not gap.tokens or mean <= (2 if flags else 8) * rounding:
        return None
    observed = (
        f"vLLM's log-probs of its first completions differ from the trainer's by {mean:.2g} per token "
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


def _distorting_flags(sampling: SamplingConfig) -> list[tuple[str, str]]:
    """Return the flags that change the sampled distribution, as typed, each with its neutral value."""
    flags = []
    if sampling.top_p < 1:
        flags.append((f"--top_p {sampling.top_p:g}", "--top_p 1"))
    if sampling.top_k > 0:
        flags.append((f"--top_k {sampling.top_k}", "--top_k -1"))
    if sampling.repetition_penalty != 1:
        flags.append((f"--repetition_penalty {sampling.repetition_penalty:g}", "--repetition_penalty 1"))
    if sampling.regex is not None:
        flags.append((f"--structured_outputs_regex {sampling.regex}", "no --structured_outputs_regex"))
    return flags


def _pairs(engine: Sequence[float], trainer: Sequence[float], shift: int) -> list[tuple[float, float]]:
    first = max(0, -shift)
    last = min(len(engine), len(trainer) - shift)
    return [(engine[t], trainer[t + shift]) for t in range(first, last)]

"""Whether the engine's log-probs of its own completions are those of the trainer: asked once, of the first rollout.

The engine's own log-probs, taken while it samples, are a way of their own: they may belong to the neighbouring token,
and they are of the distribution that was sampled, which top-p, top-k and a repetition penalty change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.types import Sample, TokenValues

COMPLETIONS = 64  # are enough
logger = logging.getLogger(__name__)

SHIFTS = (0, -1, 1)  # the engine's value at t against the trainer's at t + shift


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Of the engine's log-probs and the trainer's, summed over tokens; sums of ranks add up."""

    tokens: int = 0
    signed: float = 0.0  # engine - trainer
    apart: tuple[float, ...] = (0.0,) * len(SHIFTS)  # |engine - trainer|, for each shift
    pairs: tuple[int, ...] = (0,) * len(SHIFTS)

    @classmethod
    def of(cls, engine: Sequence[float], trainer: Sequence[float]) -> LogprobGap:
        """Of one completion."""
        shifted = [_pairs(engine, trainer, shift) for shift in SHIFTS]
        return cls(
            tokens=len(engine),
            signed=sum(a - b for a, b in zip(engine, trainer, strict=True)),
            apart=tuple(sum(abs(a - b) for a, b in pairs) for pairs in shifted),
            pairs=tuple(map(len, shifted)),
        )

    @classmethod
    def sum(cls, parts: Iterable[LogprobGap]) -> LogprobGap:
        total = cls()
        for part in parts:
            total = cls(
                total.tokens + part.tokens,
                total.signed + part.signed,
                tuple(a + b for a, b in zip(total.apart, part.apart, strict=True)),
                tuple(a + b for a, b in zip(total.pairs, part.pairs, strict=True)),
            )
        return total

    @property
    def means(self) -> tuple[float, ...]:
        """Of |engine - trainer| per token, for each shift."""
        return tuple(apart / max(pairs, 1) for apart, pairs in zip(self.apart, self.pairs, strict=True))


class LogprobCheck:
    """All ranks together. Stops on what no setting can mean, warns of what a setting does."""

    def __init__(
        self, passes: Passes, at_temperature_1: Passes, coordinator: Coordinator, sampling: SamplingConfig
    ) -> None:
        self._passes = passes
        self._at_temperature_1 = at_temperature_1
        self._coordinator = coordinator
        self._sampling = sampling

    def check(self, samples: Sequence[Sample], rounding: float) -> None:
        """`rounding`: how far log-probs of the same weights are apart on average."""
        found = self._agreement(self._passes, samples)
        check_alignment(found, rounding)
        plain = partial(self._agreement, self._at_temperature_1, samples)
        story = distortion(found, plain, self._sampling, rounding)
        if story is not None and self._coordinator.rank == 0:
            logger.warning(story)

    def _agreement(self, passes: Passes, samples: Sequence[Sample]) -> LogprobGap:
        fewest = passes.fewest_samples
        some = samples[: min(len(samples), max(COMPLETIONS, fewest)) // fewest * fewest]
        place = passes.parallel
        mine = passes.infer(some) if some else {}
        speaks = place.tp_rank == 0 and place.cp_rank == 0  # of ranks that hold copies, one
        return LogprobGap.sum(self._coordinator.all_gather(_of_samples(mine, some) if speaks else LogprobGap()))


def _of_samples(values: Mapping[int, TokenValues], samples: Sequence[Sample]) -> LogprobGap:
    told = ((samples[index].rollout_logprobs, each.logprobs) for index, each in values.items())
    return LogprobGap.sum(LogprobGap.of(engine, trainer) for engine, trainer in told if engine)


class ShiftedLogprobs(RuntimeError):
    """The engine's log-probs belong to the tokens beside."""


def check_alignment(found: LogprobGap, rounding: float) -> None:
    """Stops where the engine's log-probs are those of the tokens beside."""
    aligned, *others = found.means
    best = min(others)
    if found.tokens and aligned > 4 * rounding and best < aligned / 4:
        side = "after" if SHIFTS[1 + others.index(best)] > 0 else "before"
        raise ShiftedLogprobs(
            f"vLLM's log-probs of its completions are shifted by one: they are {aligned:.2g} per token from the "
            f"trainer's, and {best:.2g} from the trainer's of the token {side}. Rollout corrections and rollout/ "
            "metrics would read the wrong tokens. Use the versions of vLLM and ms-swift that the README names: in "
            "others, the log-probs of a response may not line up with its tokens"
        )


def distortion(
    found: LogprobGap, at_temperature_1: Callable[[], LogprobGap], sampling: SamplingConfig, rounding: float
) -> str | None:
    """What to tell if the two distributions differ by more than rounding. `at_temperature_1`: the engine against the
    trainer without --temperature."""
    mean = found.means[0]
    flags = _distorting(sampling)
    if not found.tokens or mean <= (2 if flags else 8) * rounding:
        return None
    story = (
        f"vLLM's log-probs of its first completions are {mean:.2g} per token from the trainer's "
        f"({found.signed / found.tokens:+.2g} with their sign), and rounding makes {rounding:.2g}"
    )
    if flags:
        return (
            f"{story}: {' and '.join(flag for flag, _ in flags)} make vLLM sample from another distribution than the "
            "policy's. Training on it is legal, but rollout/ metrics and --rollout_importance_sampling_mode take it "
            f"for rounding; use {' '.join(neutral for _, neutral in flags)} to sample from the policy"
        )
    if sampling.temperature != 1 and (plain := at_temperature_1()).tokens and plain.means[0] < mean / 4:
        return (
            f"{story}. At temperature 1 they are {plain.means[0]:.2g} from the trainer's, so vLLM does not heed "
            f"--temperature {sampling.temperature:g} in them; use --temperature 1"
        )
    return (
        f"{story}. No flag of sampling explains it: look into --vllm_engine_kwargs. "
        "--rollout_importance_sampling_mode corrects for a difference"
    )


def _distorting(sampling: SamplingConfig) -> list[tuple[str, str]]:
    """The flags that do, as typed, and with the value that does not."""
    found = []
    if sampling.top_p < 1:
        found.append((f"--top_p {sampling.top_p:g}", "--top_p 1"))
    if sampling.top_k > 0:
        found.append((f"--top_k {sampling.top_k}", "--top_k -1"))
    if sampling.repetition_penalty != 1:
        found.append((f"--repetition_penalty {sampling.repetition_penalty:g}", "--repetition_penalty 1"))
    return found


def _pairs(engine: Sequence[float], trainer: Sequence[float], shift: int) -> list[tuple[float, float]]:
    first, last = max(0, -shift), min(len(engine), len(trainer) - shift)
    return [(engine[t], trainer[t + shift]) for t in range(first, last)]

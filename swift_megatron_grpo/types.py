"""The values that travel between the stages of one step.

Shapes in the comments: p prompt tokens, c completion tokens, t = p + c, n tokens of a packed micro batch,
m completion tokens of a packed micro batch, s samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, as ms-swift's preprocessors leave it."""

    prompt_id: str  # unique within a run; the completions of one prompt share it
    row: dict[str, Any]  # messages, images, tools, ... and the columns that reward functions read


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of one prompt, token by token as the engine produced it."""

    prompt: Prompt
    prompt_ids: list[int]  # [p] what the engine saw
    completion_ids: list[int]  # [c] what it sampled; in several turns also what tools and environments said between
    logprobs: list[float] | None  # of the sampled tokens, under the engine's weights, at the sampling temperature
    text: str  # of several turns the last one
    finish_reason: str  # "stop" or "length"
    weights_version: int  # which weights generated it
    sampled: list[bool] | None = None  # [c] which tokens are the policy's; None: all
    messages: list[dict[str, Any]] | None = None  # of several turns, from the beginning to the last answer
    infos: dict[str, Any] = field(default_factory=dict)  # rollout_infos of ms-swift's schedulers

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def sampled_mask(self) -> list[bool]:
        """[c]"""
        return [True] * len(self.completion_ids) if self.sampled is None else self.sampled

    @property
    def length(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.sampled_mask)


@dataclass(frozen=True, slots=True)
class Graded:
    """A rollout with what the reward functions said of it."""

    rollout: Rollout
    rewards: list[float | None]  # one per reward function; None: that function does not apply
    reward: float | None  # weighted sum; None: the completion has no valid reward and is not trained
    advantage: float


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What the policy says of the trained tokens of one sample."""

    logprobs: list[float]  # [c]
    entropies: list[float] | None  # [c] of the whole distribution at each token; None: not asked for


@dataclass(slots=True)
class Sample:
    """What the engine trains on: one sequence and its per-token or per-sequence values."""

    tokens: list[int]  # [t]
    completion_mask: list[bool]  # [t] True where the policy chose the token and the token counts in the loss
    advantage: float
    group: int = 0  # completions of one prompt share it
    truncated: bool = False
    old_logprobs: list[float] | None = None  # [c]
    ref_logprobs: list[float] | None = None  # [c]
    rollout_logprobs: list[float] | None = None  # [c]
    selected: list[bool] | None = None  # [c] False: --top_entropy_quantile takes the token out of the policy loss
    left_out: int = 0  # tokens --overlong_filter does not train; the loss's denominators count them, as in ms-swift
    extras: dict[str, Any] = field(default_factory=dict)  # model inputs beyond tokens (images)

"""The values that the stages of one step pass to each other.

Shapes in the comments: p prompt tokens, c completion tokens, t = p + c, n tokens of a packed micro batch,
m completion tokens of a packed micro batch, s samples, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
import torch

# The experts that routers have chosen, by token and layer: [rows, layers of the model, k]. There may be fewer rows than
# tokens: an engine does not run the last token. Layers without experts have zeros.
# Not numpy's NDArray, which is not a class from numpy 2.5 on: messages compare the types of their fields with values.
ExpertRows = np.ndarray[Any, np.dtype[np.integer[Any]]]

# Consecutive sampled tokens that weights of one version generated: the version, and the number of tokens.
Span = tuple[int, int]

AGENT_ERROR = "agent_error"  # in the infos of a completion whose agent failed: it has no valid reward
Quantization = Literal["none", "fp8"]  # of the engine: --rollout_quantization


def span_problem(sequences: Sequence[tuple[Sequence[Sequence[int]] | None, int]], oldest: int) -> str | None:
    """Return why these cannot be the spans of a completion whose oldest weights are `oldest`; None: they can.

    `sequences`: the spans of each, None if all of its tokens are of the oldest weights, and its sampled tokens.
    """
    told = [(spans, sampled) for spans, sampled in sequences if spans is not None]
    for spans, sampled in told:
        versions, tokens = [version for version, _ in spans], [count for _, count in spans]
        if not versions or versions != sorted(set(versions)):
            return f"their versions do not ascend from {oldest}"
        if min(tokens) < 1 or sum(tokens) != sampled:
            return f"they are not of {sampled} sampled tokens"
    firsts = {spans[0][0] for spans, _ in told} | ({oldest} if len(told) < len(sequences) else set())
    return None if min(firsts) == oldest else f"their versions do not ascend from {oldest}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, as ms-swift's preprocessors leave it."""

    prompt_id: str  # unique within a run; the completions of one prompt share it
    row: dict[str, Any]  # messages, images, tools, ... and the columns that reward functions read


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens that the policy sampled in one context, with that context. The fields are those of Rollout."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    sampled: list[bool] | None = None
    spans: list[Span] | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def sampled_mask(self) -> list[bool]:
        """True for each completion token that the policy sampled, [c]."""
        return [True] * len(self.completion_ids) if self.sampled is None else self.sampled


@dataclass(eq=False, slots=True, weakref_slot=True)
class Body:
    """The tokens of a completion of one sequence that only some ranks hold; these integers are known to all."""

    prompt: int  # tokens
    completion: int  # tokens
    sampled: int  # tokens that the policy sampled
    first: int  # place of the first of these in the completion
    home: int  # the rank that has generated or received it, and sends it to the others
    prompt_id: str = ""

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of what drafts did. Without them a completion takes a step for each of its tokens."""

    tokens: int = 0  # of completions
    steps: int = 0  # in which requests took part, summed over requests
    drafted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.tokens + other.tokens, self.steps + other.steps, self.drafted + other.drafted)

    @property
    def accepted(self) -> int:
        """Tokens that took no step of their own."""
        return self.tokens - self.steps


@dataclass(slots=True)  # a frozen one takes 3 us instead of 1
class Rollout:
    """One completion of one prompt, token by token as the engine produced it.

    A conversation of which later turns were sampled in other contexts has several sequences. The fields of tokens are
    those of the last one.
    """

    prompt: Prompt
    prompt_ids: list[int]  # [p] as sent to the engine
    completion_ids: list[int]  # [c] sampled tokens; with several turns also those of tools and environments
    logprobs: list[float] | None  # of the sampled tokens, under the engine's weights, at the sampling temperature
    text: str  # decoded completion; with several turns the last turn
    finish_reason: str  # "stop" or "length"
    weights_version: int  # version of the weights that generated it; with several, the oldest
    sampled: list[bool] | None = None  # [c] True for tokens that the policy sampled; None: all
    messages: list[dict[str, Any]] | None = None  # with several turns: the conversation, with the last response
    infos: dict[str, Any] = field(default_factory=dict)  # rollout_infos of ms-swift's schedulers
    spans: list[Span] | None = None  # of the last sequence's sampled tokens, in order; None: weights_version
    routed_experts: ExpertRows | None = field(default=None, compare=False)  # of the last sequence's first tokens
    earlier: tuple[TokenSequence, ...] = ()  # the other sequences of this completion
    body: Body | None = field(default=None, compare=False)  # the tokens are in loop/bodies.py; None: they are here

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All sequences, each of which is trained."""
        last = TokenSequence(self.prompt_ids, self.completion_ids, self.logprobs, self.sampled, self.spans)
        return *self.earlier, last

    @property
    def truncated(self) -> bool:
        """True if the completion reached the length limit."""
        return self.finish_reason == "length"

    @property
    def length(self) -> int:
        """Number of tokens that the policy sampled."""
        if self.body is not None:
            return self.body.sampled
        return sum(sum(sequence.sampled_mask) for sequence in self.sequences)

    @property
    def spans_of_weights(self) -> list[Span]:
        """The spans of its sampled tokens, sequence by sequence, also where there is one alone."""
        if self.body is not None:
            return self.spans or [(self.weights_version, self.body.sampled)]
        of_sequences = (each.spans or [(self.weights_version, sum(each.sampled_mask))] for each in self.sequences)
        return list(chain.from_iterable(of_sequences))


@dataclass(frozen=True, slots=True)
class Graded:
    """A rollout with its rewards and advantage."""

    rollout: Rollout
    rewards: list[float | None]  # one per reward function; None: the function does not apply
    reward: float | None  # weighted sum; None: the completion has no valid reward and is not trained
    advantage: float


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Log-probs and entropies of the completion tokens of one sample, under the policy."""

    logprobs: list[float]  # [c]
    entropies: list[float] | None  # [c] of the full distribution at each token; None: not requested


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class ModelImage:
    """One image as a model reads it. Samples that show the same image share one object."""

    digest: str  # of its file
    grid: tuple[int, int, int]  # patches in time, height and width; of an image in tiles: tiles, and the patches of one
    merge: int  # a token stands for merge * merge patches
    channels: tuple[tuple[float, float], ...]  # per colour a, b: the model reads a * byte + b
    encode: Callable[[], torch.Tensor]  # reads and cuts it: bytes [patches or tiles, values of one], colours outermost
    has_axes: bool = True  # its tokens have positions in time, height and width; False: like text

    @property
    def token_grid(self) -> tuple[int, int, int]:
        """Tokens in time, height and width."""
        time, height, width = self.grid
        return time, height // self.merge, width // self.merge

    @property
    def num_tokens(self) -> int:
        return prod(self.token_grid)


@dataclass(frozen=True, eq=False, slots=True)
class ModelFrames(ModelImage):
    """The frames of a video as a model reads them: all, or two of them if text stands between them."""

    step: float = 1.0  # between the positions in time of two pairs of frames
    time: float | None = None  # seconds, which are written in front of these frames; None: nothing is
    ends: bool = True  # nothing of their video follows
    lead: int | None = None  # positions from the start of a video whose sound stands between its frames; None: no such


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class ModelRecording:
    """One recording as a model hears it. Samples that play the same recording share one object."""

    digest: str
    num_tokens: int
    encode: Callable[[], torch.Tensor]  # extracts its features: [bins, frames]
    has_axes: ClassVar[bool] = False  # its tokens have positions like text


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class SoundPart:
    """The part of a video's sound between two pairs of its frames."""

    sound: ModelRecording
    lead: int  # its first token, whose position is as far from the start of the video
    num_tokens: int
    ends: bool  # nothing of the video follows
    has_axes: ClassVar[bool] = False

    def rows(self, of_sound: torch.Tensor) -> torch.Tensor:
        """Return its rows of those of the sound, [tokens, h]."""
        return of_sound[self.lead : self.lead + self.num_tokens]


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image or a recording in a sequence: its tokens are those from `start` on."""

    image: ModelImage | ModelRecording | SoundPart
    start: int


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text whose log-probs engines compute. One of the tokens is the placeholder of its image, video or recording."""

    tokens: list[int]
    image: bytes | None = None  # a PNG of which no side is resized
    recording: bytes | None = None  # a WAV as engines are sent it
    video: bytes | None = None  # frames as engines are sent them


@dataclass(slots=True)
class Sample:
    """One training sequence and its per-token and per-sequence values."""

    tokens: list[int]  # [t]
    completion_mask: list[bool]  # [t] True if the policy sampled the token and the loss counts it
    advantage: float
    group: int = 0  # shared by the completions of one prompt
    completion: int = -1  # shared by the sequences of one completion; below 0: this is its only one
    truncated: bool = False
    old_logprobs: list[float] | None = None  # [c]
    ref_logprobs: list[float] | None = None  # [c]
    token_advantages: list[float] | None = None  # [c] in place of `advantage`; None: it is that of all tokens
    teacher_ratios: list[float] | None = None  # [c] log(teacher / policy), by the weights that trained it first
    teacher_logprobs: list[float] | None = None  # [c] with SDAR, which compares the teacher with the current policy
    teacher_tokens: list[int] | None = None  # the completion after the teacher's own prompt; None: as in `tokens`
    tag: str | None = None  # of its row, which picks its teacher; None: there are not several
    rollout_logprobs: list[float] | None = None  # [c]
    selected: list[bool] | None = None  # [c] False: --top_entropy_quantile or --m2_threshold excludes it from the loss
    sft_weights: list[float] | None = None  # [c] of a given answer, which SFT trains; None: the policy has sampled it
    left_out: int = 0  # tokens that --overlong_filter excludes; the loss's denominators count them, as in ms-swift
    images: tuple[PlacedImage, ...] = ()  # in the order of their tokens
    # of the first tokens; below 0, and in all further rows: the router chooses. None: it chooses for all tokens
    routed_experts: ExpertRows | None = field(default=None, compare=False)
    body: Body | None = None  # the tokens are elsewhere: neither they nor the mask nor the engine's log-probs are here
    is_left_out: bool = False  # no token of the body is trained
    context: int | None = None  # tokens before the first sampled one; None: before the first trained one
    _counts: tuple[int, int] | None = field(default=None, init=False, compare=False)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) if self.body is None else self.body.tokens

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return self._counted()[0]

    @property
    def leading(self) -> int:
        """Number of untrained tokens at the beginning that may be shared; at least one token is left after them."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, int]:
        """Count once: a step asks several times, for the samples of all ranks."""
        if self._counts is None:
            if self.body is not None:
                body = self.body
                trained, first = 0 if self.is_left_out else body.sampled, body.prompt + body.first
            else:
                mask = self.completion_mask
                trained, first = sum(mask), mask.index(True) if True in mask else len(mask)
            self._counts = trained, min(first if self.context is None else self.context, self.length - 1)
        return self._counts

    @property
    def advantages(self) -> list[float]:
        """The advantage of each trained token, [c]."""
        return [self.advantage] * self.trained if self.token_advantages is None else self.token_advantages

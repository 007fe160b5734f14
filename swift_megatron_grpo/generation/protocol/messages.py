"""Messages between trainer and rollout server: JSON, with long lists of numbers as base64 of little-endian arrays."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from pydantic import (
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

from swift_megatron_grpo.packing.expert_rows import decode_rows, encode_rows
from swift_megatron_grpo.types import ExpertRows

T = TypeVar("T")
PROTOCOL = 22  # increased by every change that is not compatible
NO_WEIGHTS = -1  # version of a server that has the checkpoint's weights, or newer ones only in part
RUN_HEADER = "X-GRPO-Run"  # the name of the run that sends a request; the status shows it
RUN_SECRET_HEADER = "X-GRPO-Run-Secret"  # proves that the request is from that run; no server reports it
RUN_IDLE_SECONDS = 20.0  # a run that has not requested the status for so long counts as ended
# HTTP status codes of a server
CONFLICT = 409  # the server has other weights than the request needs
CANCELLED = 410  # new weights arrived, or the same conversation was requested again
INVALID = 422  # the request itself is at fault
MISSING_IMAGES = 424  # an image that the request names was not sent, or is forgotten: send it again
TAKEN = 423  # the server serves another run
ENGINE_GONE = 503
SERVER_UNUSABLE = (TAKEN, ENGINE_GONE)  # this run must stop using the server, whatever the request was
MOST_IN_BATCH = 64  # requests
_SHOWN = 3  # problems that an error names


class Routes:
    STATUS = "/grpo/status"
    GENERATE = "/grpo/generate"
    GENERATE_BATCH = "/grpo/generate_batch"  # one line for each request, as soon as it ends
    JOIN = "/grpo/weights/join"
    RECEIVE = "/grpo/weights/receive"
    DRAFTS = "/grpo/drafts"  # what they did since the last request
    SCORE = "/grpo/score"
    HELD_WEIGHTS = "/grpo/held_weights"
    LEAVE = "/grpo/leave"
    IMAGES = "/grpo/images/"  # and the digest of an image


class InvalidRequest(ValueError):
    """The request of a client is at fault, and the client may read why."""

    status = INVALID


class InvalidMessage(ValueError):
    """A message that lacks fields, or has fields of other types than both ends have agreed on."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The run that sends a request. Only its name is ever shown."""

    name: str
    secret: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {RUN_HEADER: self.name, RUN_SECRET_HEADER: self.secret}


def as_json(what: str, value: Any) -> str:
    """Encode a value as JSON; numpy's numbers and arrays, which environments often return, become numbers and lists."""
    try:
        return json.dumps(value, default=_from_numpy)
    except TypeError as error:
        raise ValueError(f"the {what} must be JSON values (numbers, strings, lists, objects): {error}") from error


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{value!r:.100} is of type {type(value).__name__}")


def _decoded(text: object) -> Any:
    try:
        return json.loads(cast(str, text))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("it is not a text with JSON") from None


def _packed(dtype: str, values: list[Any]) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(dtype: str, text: object) -> list[Any]:
    try:
        values: list[Any] = np.frombuffer(base64.b64decode(cast(str, text), validate=True), dtype).tolist()
    except (TypeError, ValueError):
        raise ValueError(f"it is not base64 of an array of {dtype}") from None
    return values


packed_logprobs = partial(_packed, "<f4")  # as vLLM computes them
unpacked_logprobs = partial(_unpacked, "<f4")
Tokens = Annotated[list[int], PlainValidator(partial(_unpacked, "<i4")), PlainSerializer(partial(_packed, "<i4"))]
Logprobs = Annotated[list[float], PlainValidator(unpacked_logprobs), PlainSerializer(packed_logprobs)]
Mask = Annotated[list[bool], PlainValidator(partial(_unpacked, "?")), PlainSerializer(partial(_packed, "?"))]
# Encoded as text, because web servers reject NaN, which an environment's reward may be.
Messages = Annotated[
    list[dict[str, Any]] | None,
    BeforeValidator(_decoded),
    PlainSerializer(partial(as_json, "messages of the conversation")),
]
Infos = Annotated[
    dict[str, Any], BeforeValidator(_decoded), PlainSerializer(partial(as_json, "rollout_infos of the conversation"))
]
# Versions of weights, each with the number of sampled tokens that it generated. None: all are of weights_version.
Spans = list[tuple[StrictInt, StrictInt]] | None
Experts = Annotated[ExpertRows | None, PlainValidator(decode_rows), PlainSerializer(encode_rows)]


@dataclass(frozen=True, slots=True)
class SentSequence:
    """An earlier sequence of a conversation. The fields are those of Completion."""

    prompt_ids: Tokens
    completion_ids: Tokens
    logprobs: Logprobs | None
    sampled: Mask
    spans: Spans = None


@dataclass(frozen=True, slots=True)
class Completion:
    prompt_ids: Tokens
    completion_ids: Tokens
    logprobs: Logprobs | None
    text: str
    finish_reason: str
    weights_version: StrictInt  # of its weights; of several, the oldest
    spans: Spans = None  # of its last sequence
    # Conversations only:
    sampled: Mask | None = None  # True for those of completion_ids that the policy sampled
    messages: Messages = None
    infos: Infos = field(default_factory=dict)  # rollout_infos of scheduler and environment
    earlier: tuple[SentSequence, ...] = ()  # sequences before the last one, whose tokens are those above
    others: tuple[Completion, ...] = ()  # of the same prompt, if the request asked for a group
    # of the prompt and all but the last token, [t - 1, layers, k], if the request asked for them
    routed_experts: Experts = field(default=None, compare=False)

    @property
    def newest_version(self) -> int:
        """The version of the newest weights that generated a part of it."""
        of_sequences = [self.spans, *(each.spans for each in self.earlier)]
        return max([self.weights_version, *(spans[-1][0] for spans in of_sequences if spans)])

    def to_json(self) -> dict[str, Any]:
        """Return the completion in JSON types."""
        message: dict[str, Any] = _adapter(Completion).dump_python(self)
        return message

    @classmethod
    def from_json(cls, message: object) -> Completion:
        """Return the completion that `to_json` has encoded. Raises InvalidMessage for anything else."""
        return _read(cls, message)


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    scheduler: str  # key of swift.rollout.multi_turns
    max_turns: StrictInt | None
    gym_env: str | None  # key of swift.rollout.envs, for rows that name none
    use_gym_env: StrictBool  # the environment's reward is one of the rewards
    reads_media: StrictBool = True  # False: the calls of its agent have messages of text alone
    answers_groups: StrictBool = False  # a request is for all completions of a prompt


@dataclass(frozen=True, slots=True)
class ServerStatus:
    plugin: str  # version of this package on the server
    protocol: StrictInt
    instance: str  # a new id after every start
    run: str | None  # the run that holds the server's lease
    weights_version: StrictInt
    world_size: StrictInt  # workers that receive weights
    max_model_len: StrictInt
    max_num_seqs: StrictInt
    max_logprobs: StrictInt  # log-probs that it returns per token; -1: for the whole vocabulary
    enable_lora: StrictBool
    max_lora_rank: StrictInt
    held_media: tuple[str, ...]  # image, video, audio: it holds the parts of the model for these, which have to be sent
    images_per_prompt: StrictInt  # that it accepts; 0: none
    recordings_per_prompt: StrictInt
    videos_per_prompt: StrictInt
    quantization: str  # its --rollout_quantization
    batch_invariant: StrictBool  # completions do not depend on what else it generates
    drafts: StrictInt  # that its engine verifies in a step of a request, at most; 0: none
    returns_experts: StrictBool  # it can report which experts its routers choose
    updates_in_flight: StrictBool  # it can load weights while it generates
    conversations: ConversationSettings | None  # None: a completion is one turn
    model: dict[str, Any]  # values of its config.json that must equal the trainer's

    @classmethod
    def from_json(cls, message: object) -> ServerStatus:
        """Return the status in `message`. Raises InvalidMessage for anything else.

        Another protocol version may lack fields; the check of the status refuses it later.
        """
        if isinstance(message, dict) and message.get("protocol") != PROTOCOL:
            values: dict[str, Any] = {item.name: message.get(item.name) for item in fields(cls)}
            return cls(**values | {"protocol": -1, "run": None})
        return _read(cls, message)


def serves_another(run: str) -> str:
    return (
        f"it serves another run ({run}), and a server serves one at a time; "
        "end that run, or start a `swift rollout` for this one"
    )


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _read(cls: type[T], message: object) -> T:
    try:
        value: T = _adapter(cast(Any, cls)).validate_python(message)
    except ValidationError as error:
        raise InvalidMessage(description(error)) from None
    return value


def description(error: ValidationError) -> str:
    """Name the fields that are wrong, and not their values, which may be large or secret."""
    shown = []
    for problem in error.errors(include_input=False, include_url=False, include_context=False)[:_SHOWN]:
        place = ".".join(map(str, problem["loc"]))[:200]
        shown.append(f"{place!r}: {problem['msg'].removeprefix('Value error, ')}" if place else problem["msg"])
    return "; ".join(shown)

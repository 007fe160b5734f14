"""Messages between trainer and rollout server: JSON, with long lists of numbers as base64 of little-endian arrays.

Both ends use this file. PROTOCOL is increased by every change that is not compatible.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from swift_megatron_grpo.packing.expert_rows import decode_rows, encode_rows
from swift_megatron_grpo.types import ExpertRows

T = TypeVar("T")
PROTOCOL = 14
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


class Routes:
    """HTTP routes of a server."""

    STATUS = "/grpo/status"
    GENERATE = "/grpo/generate"
    GENERATE_BATCH = "/grpo/generate_batch"  # one line for each request, as soon as it ends
    JOIN = "/grpo/weights/join"
    RECEIVE = "/grpo/weights/receive"
    SCORE = "/grpo/score"
    HELD_WEIGHTS = "/grpo/held_weights"
    LEAVE = "/grpo/leave"
    IMAGES = "/grpo/images/"  # and the digest of an image


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


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion, token by token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str
    weights_version: int
    # Conversations only:
    sampled: list[bool] | None = None  # True for those of completion_ids that the policy sampled
    messages: list[dict[str, Any]] | None = None
    infos: dict[str, Any] = field(default_factory=dict)  # rollout_infos of scheduler and environment
    # of the prompt and all but the last token, [t - 1, layers, k], if the request asked for them
    routed_experts: ExpertRows | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the completion in JSON types."""
        return {
            "prompt_ids": _packed(self.prompt_ids, "<i4"),
            "completion_ids": _packed(self.completion_ids, "<i4"),
            "logprobs": None if self.logprobs is None else packed_logprobs(self.logprobs),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "weights_version": self.weights_version,
            "sampled": None if self.sampled is None else _packed(self.sampled, "?"),
            # Encoded as text, because web servers reject NaN, which an environment's reward may be.
            "messages": as_json("messages of the conversation", self.messages),
            "infos": as_json("rollout_infos of the conversation", self.infos),
            "routed_experts": encode_rows(self.routed_experts),
        }

    @classmethod
    def from_json(cls, message: object) -> Completion:
        """Return the completion that `to_json` has encoded. Raises InvalidMessage for anything else."""
        encoded = _fields_of(cls, message)
        logprobs, sampled = encoded["logprobs"], encoded["sampled"]
        values = encoded | {
            "prompt_ids": _unpacked("prompt_ids", encoded["prompt_ids"], "<i4"),
            "completion_ids": _unpacked("completion_ids", encoded["completion_ids"], "<i4"),
            "logprobs": None if logprobs is None else _unpacked("logprobs", logprobs, "<f4"),
            "sampled": None if sampled is None else _unpacked("sampled", sampled, "?"),
            "messages": _decoded("messages", encoded["messages"]),
            "infos": _decoded("infos", encoded["infos"]),
            "routed_experts": _rows("routed_experts", encoded["routed_experts"]),
        }
        return _checked(cls, values)


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """Settings of a server for conversations."""

    scheduler: str  # key of swift.rollout.multi_turns
    max_turns: int | None
    gym_env: str | None  # key of swift.rollout.envs, for rows that name none
    use_gym_env: bool  # the environment's reward is one of the rewards


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The status that a server reports."""

    plugin: str  # version of this package on the server
    protocol: int
    instance: str  # a new id after every start
    run: str | None  # the run that holds the server's lease
    weights_version: int
    world_size: int  # workers that receive weights
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int  # log-probs that it returns per token; -1: for the whole vocabulary
    enable_lora: bool
    max_lora_rank: int
    has_vision_tower: bool  # it holds image, video or audio parts, so weights for them have to be sent
    images_per_prompt: int  # that it accepts; 0: none
    quantization: str  # its --rollout_quantization
    returns_experts: bool  # it can report which experts its routers choose
    conversations: ConversationSettings | None  # None: a completion is one turn
    model: dict[str, Any]  # values of its config.json that must equal the trainer's

    @classmethod
    def from_json(cls, message: object) -> ServerStatus:
        """Return the status in `message`. Raises InvalidMessage for anything else.

        Another protocol version may lack fields; the check of the status refuses it later.
        """
        values = _fields_of(cls, message)
        if values["protocol"] != PROTOCOL:
            return cls(**{**values, "protocol": -1, "run": None})
        conversations = values["conversations"]
        if conversations is not None:
            values["conversations"] = _checked(ConversationSettings, _fields_of(ConversationSettings, conversations))
        return _checked(cls, values)


def serves_another(run: str) -> str:
    """Return the message for a server that serves another run."""
    return (
        f"it serves another run ({run}), and a server serves one at a time; "
        "end that run, or start a `swift rollout` for this one"
    )


def _fields_of(cls: type[Any], message: object) -> dict[str, Any]:
    """Return the fields of a dataclass in a JSON object, None for those that it lacks."""
    if not isinstance(message, dict):
        raise InvalidMessage(f"it is not a JSON object, but of type {type(message).__name__}")
    return {item.name: message.get(item.name) for item in fields(cls)}


def _checked(cls: type[T], values: dict[str, Any]) -> T:
    """Build a dataclass from values that have exactly its types."""
    for name, expected in _types_of(cls).items():
        if not _is_a(values[name], expected):
            raise InvalidMessage(f"its field {name} is of type {type(values[name]).__name__}, not {expected}")
    return cls(**values)


def _types_of(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, which take 100 microseconds to read."""
    if cls not in _types:
        _types[cls] = get_type_hints(cls)
    return _types[cls]


_types: dict[type[Any], dict[str, Any]] = {}


def _is_a(value: object, expected: Any) -> bool:
    """Return True if the value has this type; True is not an int here. Elements are checked in lists only."""
    if isinstance(expected, UnionType):
        return any(_is_a(value, choice) for choice in get_args(expected))
    if get_origin(expected) is list:
        [element] = get_args(expected)
        if type(value) is not list:
            return False
        types = set(map(type, value))  # thousands of tokens have one type
        return types <= {element} or all(_is_a(item, element) for item in value)
    return type(value) is (get_origin(expected) or expected)


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


def packed_logprobs(values: list[float]) -> str:
    """Encode log-probs as base64."""
    return _packed(values, "<f4")  # as vLLM computes them


def unpacked_logprobs(text: object) -> list[float]:
    """Decode log-probs from base64. Raises InvalidMessage for anything else."""
    return _unpacked("log-probs", text, "<f4")


def _packed(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(name: str, text: object, dtype: str) -> list[Any]:
    try:
        if not isinstance(text, str):
            raise TypeError
        values: list[Any] = np.frombuffer(base64.b64decode(text, validate=True), dtype).tolist()
    except (TypeError, ValueError):
        raise InvalidMessage(f"its field {name} is not base64 of an array of {dtype}") from None
    return values


def _rows(name: str, message: object) -> ExpertRows | None:
    try:
        return decode_rows(message)
    except ValueError as problem:
        raise InvalidMessage(f"its field {name} holds no experts: {problem}") from None


def _decoded(name: str, text: object) -> Any:
    try:
        if not isinstance(text, str):
            raise TypeError
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise InvalidMessage(f"its field {name} is not valid JSON") from None

"""Messages between trainer and rollout server: JSON, with long lists of numbers as base64 of little-endian arrays.

Both ends use this file. PROTOCOL is increased by every change that is not compatible.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

PROTOCOL = 6
API_KEY_VARIABLE = "SWIFT_ROLLOUT_API_KEY"
NO_WEIGHTS = -1  # version of a server that has the checkpoint's weights, or newer ones only in part
RUN_HEADER = "X-GRPO-Run"  # the run that sends a request
RUN_IDLE_SECONDS = 20.0  # a run that has not requested the status for so long counts as ended
# HTTP status codes of a server
CONFLICT = 409  # the server has other weights than the request needs
TAKEN = 423  # the server serves another run
ENGINE_GONE = 503
SERVER_UNUSABLE = (TAKEN, ENGINE_GONE)  # this run must stop using the server, whatever the request was


class Routes:
    """HTTP routes of a server."""

    STATUS = "/grpo/status"
    GENERATE = "/grpo/generate"
    JOIN = "/grpo/weights/join"
    RECEIVE = "/grpo/weights/receive"
    SCORE = "/grpo/score"
    HELD_WEIGHTS = "/grpo/held_weights"
    LEAVE = "/grpo/leave"


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
        }

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Completion:
        """Return the completion that `to_json` has encoded."""
        logprobs = message["logprobs"]
        return cls(
            prompt_ids=_unpacked(message["prompt_ids"], "<i4"),
            completion_ids=_unpacked(message["completion_ids"], "<i4"),
            logprobs=None if logprobs is None else unpacked_logprobs(logprobs),
            text=str(message["text"]),
            finish_reason=str(message["finish_reason"]),
            weights_version=int(message["weights_version"]),
            sampled=None if message["sampled"] is None else _unpacked(message["sampled"], "?"),
            messages=json.loads(message["messages"]),
            infos=json.loads(message["infos"]),
        )


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
    conversations: ConversationSettings | None  # None: a completion is one turn
    model: dict[str, Any]  # values of its config.json that must equal the trainer's

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> ServerStatus:
        """Return the status in `message`.

        Another protocol version may lack fields; the check of the status refuses it later.
        """
        conversations = message.get("conversations")
        values = _fields_of(cls, message) | {
            "conversations": conversations and ConversationSettings(**_fields_of(ConversationSettings, conversations))
        }
        return cls(**values)


def serves_another(run: str) -> str:
    """Return the message for a server that serves another run."""
    return (
        f"it serves another run ({run}), and a server serves one at a time; "
        "end that run, or start a `swift rollout` for this one"
    )


def _fields_of(cls: type[ServerStatus | ConversationSettings], message: dict[str, Any]) -> dict[str, Any]:
    return {item.name: message.get(item.name) for item in fields(cls)}


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


def unpacked_logprobs(text: str) -> list[float]:
    """Decode log-probs from base64."""
    return _unpacked(text, "<f4")


def _packed(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype).tolist()
    return values

"""What trainer and rollout server say to each other: JSON, with long rows of numbers as base64 of little-endian arrays.

Both ends use this file. PROTOCOL changes when one end would misunderstand the other.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

PROTOCOL = 5
API_KEY_VARIABLE = "SWIFT_ROLLOUT_API_KEY"
NO_WEIGHTS = -1  # the version of a server that has the checkpoint's weights, or half of newer ones
RUN_HEADER = "X-GRPO-Run"  # who asks
RUN_IDLE_SECONDS = 20.0  # seconds after which a run that has not asked for the status counts as ended
# HTTP statuses of a server
CONFLICT = 409  # it has other weights than the trainer counts on
TAKEN = 423  # it serves another run
ENGINE_GONE = 503
SERVER_UNUSABLE = (TAKEN, ENGINE_GONE)  # for this run, and not because of what it was asked


class Routes:
    STATUS = "/grpo/status"
    GENERATE = "/grpo/generate"
    JOIN = "/grpo/weights/join"
    RECEIVE = "/grpo/weights/receive"
    SCORE = "/grpo/score"
    HELD_WEIGHTS = "/grpo/held_weights"
    LEAVE = "/grpo/leave"


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, token by token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str
    weights_version: int
    # of a conversation:
    sampled: list[bool] | None = None  # which of completion_ids are the policy's
    messages: list[dict[str, Any]] | None = None
    infos: dict[str, Any] = field(default_factory=dict)  # what scheduler and environment say of it

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_ids": _packed(self.prompt_ids, "<i4"),
            "completion_ids": _packed(self.completion_ids, "<i4"),
            "logprobs": None if self.logprobs is None else packed_logprobs(self.logprobs),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "weights_version": self.weights_version,
            "sampled": None if self.sampled is None else _packed(self.sampled, "?"),
            # Texts, because web servers refuse NaN, which an environment's reward may be.
            "messages": as_json("messages of the conversation", self.messages),
            "infos": as_json("rollout_infos of the conversation", self.infos),
        }

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Completion:
        logprobs = said["logprobs"]
        return cls(
            prompt_ids=_unpacked(said["prompt_ids"], "<i4"),
            completion_ids=_unpacked(said["completion_ids"], "<i4"),
            logprobs=None if logprobs is None else unpacked_logprobs(logprobs),
            text=str(said["text"]),
            finish_reason=str(said["finish_reason"]),
            weights_version=int(said["weights_version"]),
            sampled=None if said["sampled"] is None else _unpacked(said["sampled"], "?"),
            messages=json.loads(said["messages"]),
            infos=json.loads(said["infos"]),
        )


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """How a server leads conversations."""

    scheduler: str  # key of swift.rollout.multi_turns
    max_turns: int | None
    gym_env: str | None  # key of swift.rollout.envs, for rows that name none
    use_gym_env: bool  # the environment's reward is one of the rewards


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server says of itself."""

    plugin: str  # this package's version there
    protocol: int
    instance: str  # another one after every start
    run: str | None  # that it serves: the first that asked since another ended
    weights_version: int
    world_size: int  # workers that receive weights
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int  # that it tells of a token; -1: of the whole vocabulary
    enable_lora: bool
    max_lora_rank: int
    conversations: ConversationSettings | None  # None: a completion is one turn
    model: dict[str, Any]  # what of its config.json must be the trainer's

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> ServerStatus:
        """Something may be missing in another protocol, which is refused when the status is looked at."""
        conversations = said.get("conversations")
        values = _fields_of(cls, said) | {
            "conversations": conversations and ConversationSettings(**_fields_of(ConversationSettings, conversations))
        }
        return cls(**values)


def serves_another(run: str) -> str:
    return (
        f"it serves another run ({run}), and a server serves one at a time; "
        "end that run, or start a `swift rollout` for this one"
    )


def _fields_of(cls: type[ServerStatus | ConversationSettings], said: dict[str, Any]) -> dict[str, Any]:
    return {each.name: said.get(each.name) for each in fields(cls)}


def as_json(what: str, value: Any) -> str:
    """numpy's numbers and arrays, which environments are full of, as numbers and lists."""
    try:
        return json.dumps(value, default=_from_numpy)
    except TypeError as error:
        raise ValueError(f"the {what} must be what JSON has a word for, numbers, texts, lists: {error}") from error


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{value!r:.100} is of type {type(value).__name__}")


def packed_logprobs(values: list[float]) -> str:
    return _packed(values, "<f4")  # as vLLM computes them


def unpacked_logprobs(text: str) -> list[float]:
    return _unpacked(text, "<f4")


def _packed(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype).tolist()
    return values

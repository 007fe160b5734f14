"""What trainer and rollout server say to each other: JSON, with long rows of numbers as base64 of little-endian arrays.

Both ends use this file. PROTOCOL changes when one end would misunderstand the other.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

PROTOCOL = 3
API_KEY_VARIABLE = "SWIFT_ROLLOUT_API_KEY"
NO_WEIGHTS = -1  # the version of a server that has the checkpoint's weights, or half of newer ones
# HTTP statuses of a server
CONFLICT = 409  # it has other weights than the trainer counts on
ENGINE_GONE = 503


class Routes:
    STATUS = "/grpo/status"
    GENERATE = "/grpo/generate"
    JOIN = "/grpo/weights/join"
    RECEIVE = "/grpo/weights/receive"
    SCORE = "/grpo/score"
    HOLDINGS = "/grpo/holdings"


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, token by token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    text: str
    finish_reason: str
    weights_version: int

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_ids": _packed(self.prompt_ids, "<i4"),
            "completion_ids": _packed(self.completion_ids, "<i4"),
            "logprobs": None if self.logprobs is None else packed_logprobs(self.logprobs),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "weights_version": self.weights_version,
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
        )


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server says of itself."""

    plugin: str  # this package's version there
    protocol: int
    instance: str  # another one after every start
    weights_version: int
    world_size: int  # workers that receive weights
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int  # that it tells of a token; -1: of the whole vocabulary
    enable_lora: bool
    max_lora_rank: int
    multi_turn: bool
    model: dict[str, Any]  # what of its config.json must be the trainer's


def packed_logprobs(values: list[float]) -> str:
    return _packed(values, "<f4")  # as vLLM computes them


def unpacked_logprobs(text: str) -> list[float]:
    return _unpacked(text, "<f4")


def _packed(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype).tolist()
    return values

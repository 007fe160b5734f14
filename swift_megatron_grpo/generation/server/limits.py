"""The limits of a rollout server on what it receives. Flags of `swift rollout` set them, see arguments.py."""

from __future__ import annotations

from dataclasses import dataclass

_CHARACTERS_PER_TOKEN = 32  # more than any tokenizer needs for text
_LEAST_CHARACTERS = 2**20


@dataclass(frozen=True, slots=True)
class TrafficLimits:
    """Limits on connections and on requests, whatever they contain."""

    body_bytes: int
    body_seconds: float  # to send one body
    requests: int  # in progress
    connections: int
    idle_seconds: float  # of a connection without a request


@dataclass(frozen=True, slots=True)
class ContentLimits:
    """Limits on the content of one request."""

    nesting: int  # levels of lists and objects
    messages: int  # of one request
    prompt_characters: int
    max_model_len: int
    vocab_size: int
    accepts_media: bool  # the model has an image, video or audio part


def prompt_characters(flag: int | None, max_model_len: int) -> int:
    """Return the limit on the characters of one prompt: by default what can fill the engine's context."""
    return flag if flag is not None else max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * max_model_len)

"""OpenAI's chat completions: what an agent may ask, and its answer in JSON, whole or as a stream of one part.

The run decides how tokens are sampled, so temperature, top_p and the like have no effect. What would change the answer
in another way is refused.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_MESSAGES, _MOST_STOPS = 10_000, 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ALLOWED: dict[str, tuple[Any, ...]] = {  # values of parameters that would change what is sampled
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "functions": ([],),
}


class CallRefused(Exception):
    """A call that is not answered, with the HTTP status. SDKs repeat a call after a status of 408, 429 or 500."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.code = status, code


def refusal_json(refusal: CallRefused) -> dict[str, Any]:
    about = {"type": "invalid_request_error", "param": None, "code": refusal.code}
    return {"error": {"message": str(refusal), **about}}


@dataclass(frozen=True, slots=True)
class Call:
    """One request of an agent."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    model: str
    name: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")  # of the call and its answer


@dataclass(frozen=True, slots=True)
class Answer:
    """One response of the engine."""

    text: str
    tool_calls: list[dict[str, Any]]  # that the text consists of
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None  # the call's own stop, which follows the text

    @property
    def message(self) -> dict[str, Any]:
        """Return the message that an agent gets, and sends back with its next call."""
        if self.tool_calls:
            return {"role": "assistant", "content": None, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text}


def key_of(message: dict[str, Any]) -> str:
    """Return what tells an assistant's message from others: its tool calls or, without any, its text."""
    calls = message.get("tool_calls")
    if not calls:
        return json.dumps(message["content"])
    return json.dumps(
        [[c.get("id"), c["function"]["name"], _spelt_alike(c["function"].get("arguments"))] for c in calls]
    )


def _spelt_alike(arguments: str | None) -> str | None:
    """Return arguments as JSON is written here: packages that parse them send them back in a spelling of their own."""
    try:
        return json.dumps(json.loads(arguments or ""))
    except (ValueError, RecursionError):
        return arguments


def before_stop(text: str, stops: Iterable[str]) -> tuple[str, str | None]:
    """Return the text before the first of these stops, and that stop; None: the text has none."""
    place, stop = min(((text.index(stop), stop) for stop in stops if stop in text), default=(len(text), None))
    return text[:place], stop


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that is a body. Raises CallRefused for anything else."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise CallRefused("the body is not JSON") from None
    if not isinstance(given, dict):
        raise CallRefused("the body is not an object")
    return given


def parse(body: bytes) -> Call:
    """Return the call in a body. Raises CallRefused for anything else."""
    return call_of(read_object(body))


def call_of(call: dict[str, Any]) -> Call:
    """Return a call from the content of its body. Raises CallRefused for one that is not valid."""
    for name, allowed in _ALLOWED.items():
        value = call.get(name)
        require(value is None or value in allowed, f"{name} {value!r:.40} is not supported; use {allowed[0]!r}")
    messages: Any = call.get("messages")
    tools = call.get("tools")
    require(
        isinstance(messages, list) and 0 < len(messages) <= MOST_MESSAGES,
        f"messages must be a list of 1 to {MOST_MESSAGES}",
    )
    require(
        tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)),
        "tools must be a list of objects",
    )
    stop = call.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    require(
        isinstance(stop, list) and len(stop) <= _MOST_STOPS and all(isinstance(s, str) and s for s in stop),
        f"stop must be at most {_MOST_STOPS} texts",
    )
    given = [call[name] for name in ("max_tokens", "max_completion_tokens") if call.get(name) is not None]
    require(all(type(number) is int and number > 0 for number in given), "max_tokens must be a positive number")
    return Call(
        messages=[_message(message) for message in messages],
        tools=None if call.get("tool_choice") == "none" or not tools else tools,
        max_tokens=min(given, default=None),
        stop=tuple(stop),
        stream=call.get("stream") is True,
        model=str(call.get("model", ""))[:200],
    )


def require(fits: bool, problem: str) -> None:
    if not fits:
        raise CallRefused(problem)


def _message(message: Any) -> dict[str, Any]:
    """Return a message with its content as one text; parts other than texts are refused."""
    require(isinstance(message, dict), "a message is not an object")
    require(message.get("role") in list(_ROLES), f"a message has none of the roles {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        require(all(map(_is_text, content)), "a message has parts that are not texts")
        content = "".join(part["text"] for part in content)
    require(content is None or isinstance(content, str), "a content is neither a text nor a list of parts")
    kept = {name: message[name] for name in ("tool_call_id", "tool_calls") if message.get(name)}
    require(_are_tool_calls(kept.get("tool_calls", [])), "tool_calls must be a list of objects with a function")
    return {"role": _ROLES[message["role"]], "content": content or "", **kept}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _are_tool_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        and isinstance(call["function"].get("arguments", ""), str)
        for call in calls
    )


def to_json(call: Call, answer: Answer) -> dict[str, Any]:
    choice = {"message": answer.message, "finish_reason": answer.finish_reason}
    return _envelope(call, "chat.completion", [choice]) | {"usage": _usage(answer)}


def to_stream(call: Call, answer: Answer) -> Iterator[bytes]:
    """Yield the answer as server-sent events: its content, why it ends, how many tokens it has, and the end."""
    calls = [{"index": index, **of_answer} for index, of_answer in enumerate(answer.tool_calls)]
    delta = answer.message | ({"tool_calls": calls} if calls else {})
    kind = "chat.completion.chunk"
    for event in (
        _envelope(call, kind, [{"delta": delta, "finish_reason": None}]),
        _envelope(call, kind, [{"delta": {}, "finish_reason": answer.finish_reason}]),
        _envelope(call, kind, []) | {"usage": _usage(answer)},
    ):
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens, "total_tokens": total,
    }  # fmt: skip


def _envelope(call: Call, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [{"index": 0, "logprobs": None, **choice} for choice in choices]
    return {"id": call.name, "object": kind, "created": int(time.time()), "model": call.model, "choices": choices}

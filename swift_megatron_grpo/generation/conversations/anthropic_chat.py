"""Anthropic's messages: bodies as those of OpenAI's chat completions, and answers in JSON, whole or as a stream.

What chat.py refuses is refused here as well, and so are tools that Anthropic's servers would run.
"""

import json
from collections.abc import Iterator
from typing import Any

from swift_megatron_grpo.generation.conversations import chat
from swift_megatron_grpo.generation.conversations.chat import Answer, Call, CallRefused, read_object, require

_RUN_BY_SERVERS = ("mcp_servers", "container")
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # by OpenAI's name; others: the turn has ended
_ERRORS = {401: "authentication_error", 413: "request_too_large", 429: "rate_limit_error"}  # by status
_NOT_SENT_BACK = ("thinking", "redacted_thinking")  # blocks that the policy has never written


def refusal_json(refusal: CallRefused) -> dict[str, Any]:
    message = str(refusal)
    if refusal.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by which agents know that they have to compact
    kind = _ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def parse(body: bytes) -> Call:
    """Return the call in a body. Raises CallRefused for anything else."""
    given = read_object(body)
    for name in _RUN_BY_SERVERS:
        require(not given.get(name), f"{name} is not supported; leave it out")
    messages, system = given.get("messages"), given.get("system")
    require(isinstance(messages, list), "messages must be a list")
    assert isinstance(messages, list)
    translated = [{"role": "system", "content": system}] if system else []
    for message in messages:
        translated += _messages(message)
    output = given.get("output_config") or {}
    require(isinstance(output, dict), "output_config is not an object")
    choice = given.get("tool_choice") or {}
    require(isinstance(choice, dict), "tool_choice is not an object")
    return chat.call_of(
        {
            "messages": translated,
            "tools": _tools(given.get("tools")),
            "tool_choice": choice.get("type"),
            "response_format": output.get("format") or given.get("output_format"),
            "stop": given.get("stop_sequences"),
            **{name: given[name] for name in ("max_tokens", "stream", "model") if name in given},
        }
    )


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    require(
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools), "tools must be a list of objects"
    )
    for tool in tools:
        require(
            tool.get("type") in (None, "custom") and isinstance(tool.get("input_schema"), dict),
            f"the tool {tool.get('name')!r:.40} is one of Anthropic's servers; use tools with an input_schema",
        )
    functions = [(tool.get("name"), tool.get("description", ""), tool["input_schema"]) for tool in tools]
    return [
        {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
        for name, description, parameters in functions
    ]


def _messages(message: Any) -> list[dict[str, Any]]:
    """Return a message as those of OpenAI: every result of a tool is one."""
    require(isinstance(message, dict), "a message is not an object")
    role, content = message.get("role"), message.get("content")
    require(role in ("user", "assistant", "system"), "a message has none of the roles user, assistant")
    if not isinstance(content, list):
        require(isinstance(content, str), "a content is neither a text nor a list of blocks")
        return [{"role": role, "content": content}]
    require(all(isinstance(block, dict) for block in content), "a block is not an object")
    blocks = [block for block in content if block.get("type") not in _NOT_SENT_BACK]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    texts = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use")]  # or refused
    require(not results or role == "user", "a tool_result is in a message that is not the user's")
    require(not calls or role == "assistant", "a tool_use is in a message that is not the assistant's")
    translated = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content", "")}
        for block in results
    ]
    if calls or texts or not results:
        own = {"role": role, "content": texts}
        translated.append(own | {"tool_calls": [_tool_call(block) for block in calls]} if calls else own)
    return translated


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    require(isinstance(block.get("input"), dict), "the input of a tool_use is not an object")
    function = {"name": block.get("name"), "arguments": json.dumps(block["input"])}
    return {"id": block.get("id"), "type": "function", "function": function}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """Return the calls of tools or, if there are none with an object as input, the text that the policy wrote."""
    try:
        inputs = [json.loads(call["function"]["arguments"]) for call in answer.tool_calls]
    except (ValueError, RecursionError):
        inputs = [None]
    if inputs and all(isinstance(each, dict) for each in inputs):
        return [
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
            for call, given in zip(answer.tool_calls, inputs, strict=True)
        ]
    return [{"type": "text", "text": answer.text}]


def to_json(call: Call, answer: Answer) -> dict[str, Any]:
    blocks = _blocks(answer)
    reason = _STOP_REASONS.get(answer.finish_reason, "end_turn")
    if reason == "tool_use" and blocks[0]["type"] == "text":
        reason = "end_turn"
    stop = answer.stop if reason == "end_turn" else None
    return {
        "id": call.name,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": blocks,
        "stop_reason": reason if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def to_stream(call: Call, answer: Answer) -> Iterator[bytes]:
    """Yield the answer as server-sent events, with each block as one part."""
    message = to_json(call, answer)
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message | {"content": [], "stop_reason": None}},
    ]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": block | empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    events += [
        {"type": "message_delta", "delta": ending, "usage": {"output_tokens": answer.completion_tokens}},
        {"type": "message_stop"},
    ]
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()

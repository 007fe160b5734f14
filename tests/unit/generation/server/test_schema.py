"""Every body is either a request that vLLM can be given, or refused with one kind of error that names a field."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from dataclasses import asdict, replace
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from swift.infer_engine import RequestConfig
from vllm import SamplingParams

from swift_megatron_grpo.generation.interface import Request
from swift_megatron_grpo.generation.protocol.messages import Routes
from swift_megatron_grpo.generation.requests import conversation_payload, infer_request, request_config
from swift_megatron_grpo.generation.server.schema import (
    SCHEMAS,
    STOCK_SCHEMAS,
    ContentLimits,
    GenerateRequest,
    InvalidBody,
    ScoreRequest,
    StockInfer,
    StockTensor,
    StockTensors,
    parse,
    prompt_characters,
)
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import Prompt
from tests.support.fuzzing import STOCK_BODIES, damaged_body

TEXT = ContentLimits(
    nesting=16, messages=8, prompt_characters=2000, max_model_len=256, vocab_size=300, accepts_media=False, images=0
)
MEDIA = replace(TEXT, accepts_media=True, images=2)
ROW = {"messages": [{"role": "user", "content": "hello", "loss": None}], "letters": "abc", "score": float("nan")}
PROMPT = Prompt("0-7", ROW)
SAMPLING = request_config(SamplingConfig(1.0, 1.0, -1, 1.0, max_completion_length=4, stop_words=("x",)), seed=2**48)


def body_of(request: dict[str, Any], sampling: RequestConfig = SAMPLING) -> dict[str, Any]:
    return {"request": request, "sampling": asdict(sampling), "weights_version": 7}


VALID: dict[str, Any] = {
    Routes.GENERATE: body_of(conversation_payload(Request(1, PROMPT, seed=3))) | {"newer_weights": True, "group": 4},
    Routes.GENERATE_BATCH: {"requests": [body_of(conversation_payload(Request(i, PROMPT, seed=i))) for i in range(3)]},
    Routes.SCORE: {"tokens": [1, 2, 299], "weights_version": 0},
    Routes.JOIN: {"host": "fe80::1%eth0", "port": 0, "timeout": 240.0},
    Routes.RECEIVE: {"version": 0, "lora": False, "collect_checksums": True, "in_flight": True},
    "/init_communicator/": {"host": "0.0.0.0", "port": 51216, "world_size": 2},
    **STOCK_BODIES,
}
ALL_SCHEMAS = SCHEMAS | STOCK_SCHEMAS


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_what_the_trainer_sends_is_accepted_as_it_is() -> None:
    """All columns reach the environment, NaN included, and all sampling parameters the engine."""
    for payload, columns in [
        (asdict(infer_request(PROMPT)), {}),
        (
            conversation_payload(Request(1, PROMPT, seed=3)),
            {"letters": "abc", "score": pytest.approx(float("nan"), nan_ok=True)},
        ),
    ]:
        accepted = parse(encode(body_of(payload)), GenerateRequest, TEXT).model_dump(exclude_unset=True)
        assert accepted["request"] == payload | {"data_dict": columns}
        assert accepted["sampling"] == asdict(SAMPLING) and accepted["weights_version"] == 7


def test_every_route_with_a_body_has_a_valid_example() -> None:
    for route in ALL_SCHEMAS.keys() & VALID.keys():
        parse(encode(VALID[route]), ALL_SCHEMAS[route], TEXT)
    assert SCHEMAS.keys() <= VALID.keys()


@settings(max_examples=2000)
@given(st.sampled_from(sorted(ALL_SCHEMAS.keys() & VALID.keys())), st.integers(0, 2**64))
def test_a_damaged_request_is_valid_or_refused(route: str, seed: int) -> None:
    body = damaged_body(VALID[route], random.Random(seed))
    try:
        accepted = parse(body, ALL_SCHEMAS[route], TEXT)
    except InvalidBody as refusal:
        assert len(str(refusal)) < 1000
        return
    sent = json.loads(body)
    if isinstance(accepted, StockInfer):  # ms-swift's client sends more, which is dropped
        sent = {name: value for name, value in sent.items() if name in StockInfer.model_fields}
    assert comparable(accepted.model_dump(exclude_unset=True)) == comparable(sent)
    if isinstance(accepted, GenerateRequest):
        config = RequestConfig(**accepted.sampling.model_dump())
        if (config.temperature or 0) <= 2:  # vLLM's own limit, with an error of its own
            assert SamplingParams(max_tokens=config.max_tokens, seed=config.seed, temperature=config.temperature or 0.0)


def comparable(value: Any) -> Any:
    """Return the values with their types, but an integer equals a float, and columns are left out: they are decoded."""
    if isinstance(value, dict):
        return {name: comparable(inner) for name, inner in value.items() if name != "data_dict"}
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return (type(value), value) if not isinstance(value, int | float) or isinstance(value, bool) else float(value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"temperature": True}, "'sampling.temperature'"),
        ({"temperature": "1"}, "'sampling.temperature'"),
        ({"temperature": -0.1}, "'sampling.temperature'"),
        ({"n": True}, "'sampling.n'"),
        ({"n": 1.0}, "'sampling.n'"),
        ({"stream": 0}, "'sampling.stream'"),
        ({"stream": True}, "'sampling.stream': must be false"),
        ({"seed": 2**63}, "integers must fit into 64 bits"),
        ({"top_logprobs": 5}, "'sampling.top_logprobs'"),
        ({"stop": "x"}, "'sampling.stop'"),
        ({"secret value": "another secret"}, "'sampling.secret value': Extra inputs are not permitted"),
    ],
)
def test_an_error_names_the_field_and_not_its_value(change: dict[str, Any], problem: str) -> None:
    body = body_of(asdict(infer_request(PROMPT)))
    body["sampling"] |= change
    with pytest.raises(InvalidBody, match=problem) as refusal:
        parse(encode(body), GenerateRequest, TEXT)
    assert "another secret" not in str(refusal.value)


@pytest.mark.parametrize("value", [1, 0, "true", None, [], {}])
@pytest.mark.parametrize(("route", "field"), [(Routes.GENERATE, "newer_weights"), (Routes.RECEIVE, "in_flight")])
def test_whether_weights_change_in_flight_is_true_or_false(route: str, field: str, value: Any) -> None:
    with pytest.raises(InvalidBody, match=f"'{field}'"):
        parse(encode(VALID[route] | {field: value}), SCHEMAS[route], TEXT)


@pytest.mark.parametrize("value", [0, -1, 1025, 2**70, "4", True, 1.5, [4]])
def test_a_group_has_a_number_of_completions(value: Any) -> None:
    with pytest.raises(InvalidBody, match=r"'group'|64 bits"):
        parse(encode(VALID[Routes.GENERATE] | {"group": value}), GenerateRequest, TEXT)


def encoded(kind: str = "PNG", side: int = 8) -> str:
    file = BytesIO()
    Image.new("L", (side, side)).save(file, format=kind)
    return b64encode(file.getvalue()).decode()


IMAGE = f"data:image/png;base64,{encoded()}"


@pytest.mark.parametrize(
    "prompt",
    [
        {"images": [IMAGE]},
        {"images": [encoded()]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "?"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [IMAGE]},
    ],
)
def test_bytes_that_the_client_sends_are_media_for_models_that_take_them(prompt: dict[str, Any]) -> None:
    body = encode({"infer_requests": [{"messages": ROW["messages"], **prompt}]})
    [accepted] = parse(body, StockInfer, MEDIA).infer_requests
    assert set(accepted.images) <= {IMAGE, f"data:media/base64;base64,{encoded()}"}
    with pytest.raises(InvalidBody, match="takes text only"):
        parse(body, StockInfer, TEXT)


@pytest.mark.parametrize(
    "source",
    ["/etc/passwd", "a.png", "http://10.0.0.1/a.png", "file:///etc/passwd", "data:,a", "abcde", "", "ftp://a", "~"],
)
def test_paths_and_urls_are_no_media(source: str) -> None:
    part = {"type": "image", "image": source}
    for prompt in (
        {"images": [source]},
        {"videos": [source]},
        {"messages": [{"role": "user", "content": [part]}]},
        {"messages": [{"role": "user", "content": [{"type": "video", "video": [source]}]}]},
        # templates merge these options into {"image": ...} for the reader of an image
        {"images": [IMAGE], "chat_template_kwargs": {"image": source}},
        {"videos": [IMAGE], "chat_template_kwargs": {"video": source}},
    ):
        body = encode({"infer_requests": [{"messages": ROW["messages"], **prompt}]})
        for limits in (TEXT, MEDIA):
            with pytest.raises(InvalidBody):
                parse(body, StockInfer, limits)


def part(source: str) -> dict[str, Any]:
    return {"type": "image", "image": source}


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"images": [encoded("PPM")]}, "'infer_requests.0.images': must be an image: PNG"),
        ({"images": [encoded(side=8200)]}, "'infer_requests.0.images': must have at most 67108864 pixels"),
        ({"images": [IMAGE] * 3}, "more than 2 images in a prompt"),
        ({"messages": [{"role": "user", "content": [part(f"data:image/x;base64,{encoded('PCX')}")]}]}, "an image: PNG"),
        ({"messages": [{"role": "user", "content": [part(IMAGE)] * 3}]}, "more than 2 images in a prompt"),
        ({"images": [IMAGE], "chat_template_kwargs": {"min_pixels": 2**40}}, "min_pixels must be a number of at most"),
        ({"videos": [IMAGE]}, "'infer_requests.0.videos': must be the frames of a video"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": IMAGE}]}]},
            "must be the frames of a vi",
        ),
    ],
)
def test_media_in_a_request_are_limited_as_those_sent_before_it(prompt: dict[str, Any], problem: str) -> None:
    body = encode({"infer_requests": [{"messages": ROW["messages"], **prompt}]})
    with pytest.raises(InvalidBody) as refusal:
        parse(body, StockInfer, MEDIA)
    assert problem in str(refusal.value)


@pytest.mark.parametrize("text", ["data: x y", "data:image/png;base64," + "A" * 2000, "data:," + "a" * 2000])
def test_text_that_looks_like_media_counts_as_text(text: str) -> None:
    text = text.ljust(2001)
    for message in (
        {"role": "user", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "tool", "content": [part(text)]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": text}}]},
    ):
        with pytest.raises(InvalidBody, match="--max_prompt_characters"):
            parse(encode({"infer_requests": [{"messages": [message]}]}), StockInfer, MEDIA)
    long = f"data:image/png;base64,{encoded('PNG', 3000)}"
    assert len(long) > 2000
    parse(encode({"infer_requests": [{"messages": [{"role": "user", "content": [part(long)]}]}]}), StockInfer, MEDIA)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ScoreRequest, {"tokens": ["x"] * 10**5, "weights_version": 0}),
        (StockInfer, {"infer_requests": ["x"] * 60_000}),
        (StockInfer, {"infer_requests": [{"messages": ["x"] * 10**5}]}),
        (StockInfer, {"infer_requests": [{"messages": ROW["messages"], "images": [1] * 10**5}]}),
        (StockInfer, {"infer_requests": [{"messages": ROW["messages"], "tools": [1] * 10**5}]}),
        (StockTensor, {"name": "a", "dtype": "bool", "shape": ["x"] * 10**5}),
        (StockTensors, {"metadatas": ["x"] * 10**5}),
        (ScoreRequest, {str(number): number for number in range(10**5)}),
    ],
)
def test_a_million_mistakes_are_described_as_few(schema: Any, body: dict[str, Any]) -> None:
    """Describing each would keep the web server from its other clients for minutes."""
    with pytest.raises(ValidationError) as refusal:
        schema.model_validate(body, context=TEXT)
    assert refusal.value.error_count() < 10


def test_a_prompt_may_fill_the_engines_context() -> None:
    assert prompt_characters(None, 256) == 2**20 and prompt_characters(None, 131072) == 2**22
    assert prompt_characters(10, 256) == 10
    many_keys = body_of({"messages": [{"role": "tool", "content": {"k" * 3000: 1}}]})
    with pytest.raises(InvalidBody, match="--max_prompt_characters"):
        parse(encode(many_keys), GenerateRequest, TEXT)

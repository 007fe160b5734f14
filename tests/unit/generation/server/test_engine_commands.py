"""Errors in requests are the fault of the client, also if vLLM finds them, or would fail."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from swift_megatron_grpo.generation.protocol.messages import (
    CONFLICT,
    NO_WEIGHTS,
    Completion,
    InvalidRequest,
    SentSequence,
)
from swift_megatron_grpo.generation.server import engine_process
from swift_megatron_grpo.generation.server.engine_process import EngineCommands, MissingImages, with_versions


def run(call: Callable[[EngineCommands], Awaitable[Any]], conversations: Any = None) -> None:
    """Await what `call` returns for the commands of an engine that runs; it generates nothing here."""
    processor = SimpleNamespace(process_outputs=None)
    tokenizer = SimpleNamespace(convert_tokens_to_ids={"<image>": 7, "<audio>": 8, "<video>": 9}.get)
    template = SimpleNamespace(
        processor=SimpleNamespace(
            tokenizer=tokenizer, image_token="<image>", audio_token="<audio>", video_token="<video>"
        )
    )
    engine: Any = SimpleNamespace(engine=SimpleNamespace(errored=False, output_processor=processor), template=template)

    async def scenario() -> None:
        await call(EngineCommands(engine, conversations, max_media_bytes=1))

    asyncio.run(scenario())


def test_a_refusal_by_vllm_is_the_clients_fault() -> None:
    async def command() -> None:
        raise VLLMValidationError("temperature must be in [0, 2]", parameter="temperature", value="a long value")

    with pytest.raises(InvalidRequest, match=r"^temperature must be in \[0, 2\]$"):
        run(lambda commands: commands._unless_engine_failed(command))


@pytest.mark.parametrize("tokens", [[1, 2], [7, 1, 7]])
def test_a_text_to_score_has_one_place_for_its_image(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="'tokens' must have one placeholder of the image"):
        run(lambda commands: commands.commands["score_text"](tokens=tokens, image="iVBORw0KGgo="))


@pytest.mark.parametrize("tokens", [[1, 2], [8, 1, 8]])
def test_a_text_to_score_has_one_place_for_its_recording(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="'tokens' must have one placeholder of the audio"):
        run(lambda commands: commands.commands["score_text"](tokens=tokens, recording="UklGRg=="))


@pytest.mark.parametrize("tokens", [[1, 2], [9, 1, 9]])
def test_a_text_to_score_has_one_place_for_its_video(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="'tokens' must have one placeholder of the video"):
        run(lambda commands: commands.commands["score_text"](tokens=tokens, video="UklGRg=="))


@pytest.mark.parametrize(
    ("conversations", "given"),
    [
        (None, {"group": 4}),
        (SimpleNamespace(answers_groups=False), {"group": 4}),
        (SimpleNamespace(answers_groups=True), {}),
        (SimpleNamespace(answers_groups=True), {"group": 4, "tokens_of_all_turns": 9}),
    ],
)
def test_a_group_is_for_a_scheduler_that_answers_groups(conversations: Any, given: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="a request must have 'group', and no 'tokens_of_all_turns'"):
        run(lambda commands: commands.commands["generate"](request={}, sampling={}, **given), conversations)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("image", "audio_digests"), ("audio", "image_digests"), ("image", "video_digests"), ("video", "audio_digests")],
)
def test_a_request_cannot_name_an_image_as_a_recording(kind: str, named: str) -> None:
    """The decoder of the one would read the other."""

    async def confuse(commands: EngineCommands) -> None:
        await commands.commands["put_image"](kind=kind, digest="a" * 40, image="UklGRg==")
        await commands.commands["generate"](request={}, sampling={}, **{named: ["a" * 40]})

    with pytest.raises(MissingImages):
        run(confuse)


def test_a_completion_has_its_oldest_version_and_spans_only_of_others() -> None:
    one = Completion([1], [2, 3], None, "", "stop", NO_WEIGHTS)
    assert with_versions(one, 7) == replace(one, weights_version=7)
    assert with_versions(replace(one, spans=[(6, 2)]), 7) == replace(one, weights_version=6)
    mixed = replace(one, spans=[(5, 1), (7, 1)])
    assert with_versions(mixed, 7) == replace(mixed, weights_version=5)
    earlier = SentSequence([1], [2], None, [True], [(4, 1)])
    assert with_versions(replace(mixed, earlier=(earlier,)), 7) == replace(
        mixed, weights_version=4, earlier=(replace(earlier, spans=None),)
    )
    unsampled = replace(one, spans=[], sampled=[False, False])  # of a conversation that trains nothing
    assert with_versions(unsampled, 7) == replace(unsampled, weights_version=7, spans=None)


def test_no_request_begins_with_weights_of_which_some_are_newer() -> None:
    """The web server learns of the failure after the engine has resumed."""

    async def fails(*_: Any) -> None:
        raise ConnectionError("the trainer has gone")

    async def resume() -> None:
        with pytest.raises(InvalidRequest) as refused:
            await made[0].commands["generate"](request={}, sampling={})
        assert refused.value.status == CONFLICT

    made: list[EngineCommands] = []

    async def scenario(commands: EngineCommands) -> None:
        made.append(commands)
        engine: Any = commands._engine.engine
        engine.update_in_flight, engine.resume = fails, resume
        with pytest.raises(ConnectionError):
            await commands.commands["receive"](version=4, lora=False, collect_checksums=False, in_flight=True)

    run(scenario)


def test_a_task_that_leaves_does_not_end_the_process_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave() -> None:
        sys.exit(0)

    async def work(*_: Any) -> None:
        await asyncio.wait([asyncio.create_task(leave())])
        os._exit(7)

    monkeypatch.setattr(engine_process, "_run_worker", work)
    nothing: Any = None
    process = multiprocessing.get_context("fork").Process(
        target=engine_process.run_engine_process, args=(nothing, 0, nothing, nothing)
    )
    process.start()
    process.join(30)
    assert process.exitcode == 7

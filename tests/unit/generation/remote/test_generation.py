"""Generations that go on while the trainer does something else: a real event loop, and web servers that answer when
they are told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.interface import Progress, requests_for
from swift_megatron_grpo.generation.remote.event_loop import EventLoopThread
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import NoServer, Server, Servers
from swift_megatron_grpo.protocol.messages import SERVER_UNUSABLE, Completion, Routes
from swift_megatron_grpo.types import Prompt, Rollout
from tests.unit.arguments.test_server_checks import CONFIG, status

pytestmark = pytest.mark.alone

SAMPLING = SamplingConfig(1.0, 1.0, -1, 1.0, max_completion_length=4, stop_words=())


@dataclass
class Answers:
    """Every request waits to be let go."""

    asked: list[str] = field(default_factory=list)  # questions, as they came
    given_up: list[str] = field(default_factory=list)  # whose asker went away
    refusal: int | None = None  # what it answers instead
    most_at_once: int = 0
    waiting: dict[str, asyncio.Event] = field(default_factory=dict)

    async def generate(self, request: web.Request) -> web.Response:
        said = await request.json()
        question = said["request"]["messages"][0]["content"]
        self.asked.append(question)
        if self.refusal is not None:
            return web.json_response({"detail": "no"}, status=self.refusal)
        self.waiting[question] = asyncio.Event()
        self.most_at_once = max(self.most_at_once, len(self.waiting))
        try:
            await self.waiting[question].wait()
        except asyncio.CancelledError:
            self.given_up.append(question)
            raise
        finally:
            del self.waiting[question]
        return web.json_response(Completion([1], [2], [-1.0], question, "stop", said["weights_version"]).to_json())


class Place:
    """Two servers, in one event loop with those who ask them."""

    def __init__(self) -> None:
        self.background = EventLoopThread("test")
        self.answers = [Answers(), Answers()]
        self.generations: list[RemoteGeneration] = []
        self.background.run(self._open())

    async def _open(self) -> None:
        self._runners, urls = [], []
        for answers in self.answers:
            app = web.Application()
            app.router.add_post(Routes.GENERATE, answers.generate)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        self.servers = Servers(replace(CONFIG, urls=tuple(urls), group_ports=(0, 0), request_timeout=60, timeout=0.5))
        await self.servers.open()

    def close(self) -> None:
        for generation in self.generations:
            self.background.run(generation.stop())
        self.background.run(self._close())
        self.background.stop()

    async def _close(self) -> None:
        await self.servers.close()
        for runner in self._runners:
            await runner.cleanup()

    def has_weights(self, server: Server, version: int, slots: int = 8) -> None:
        async def receive() -> None:
            server.status = status(max_num_seqs=slots)
            server.received(version, collect_checksums=True)
            await self.servers.mark_verified(version)

        self.background.run(receive())

    def lose(self, server: Server) -> None:
        async def lose() -> None:
            self.servers.lose(server, "it is taken away")

        self.background.run(lose())

    def comes_back(self, server: Server) -> None:
        async def answers() -> None:
            self.servers._answered(server, status(instance="another"))

        self.background.run(answers())

    def generate(self, names: str, version: int, older: list[RemoteGeneration] | None = None) -> RemoteGeneration:
        """One completion for each letter."""
        prompts = [Prompt(name, {"messages": [{"role": "user", "content": name}]}) for name in names]
        requests = requests_for(prompts, 1, None, version)
        made = RemoteGeneration(self.background, self.servers, requests, 1, SAMPLING, version, older or [])
        self.generations.append(made)
        return made

    def let_go(self, *names: str) -> None:
        async def let_go() -> None:
            for name in names:
                for answers in self.answers:
                    if name in answers.waiting:
                        answers.waiting[name].set()

        self.background.run(let_go())


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def collect(generation: RemoteGeneration, newest: int, number: int) -> list[Rollout]:
    found: dict[int, Rollout] = {}
    while len(found) < number:
        progress = generation.next(newest)
        assert not progress.needs_weights
        found |= progress.finished
    return [found[index] for index in sorted(found)]


def test_the_older_generation_is_served_first_and_both_share_the_slots(place: Place) -> None:
    [server, _], [answers, _] = place.servers.all, place.answers
    place.has_weights(server, 0, slots=2)  # and one more waits there
    older = place.generate("abcde", 0)
    until(lambda: len(answers.asked) == 3)
    newer = place.generate("vwx", 0, [older])
    time.sleep(0.1)
    assert answers.asked == ["a", "b", "c"]
    place.let_go("a", "b")
    until(lambda: len(answers.asked) == 5)
    assert answers.asked[3:] == ["d", "e"] and not older.waits
    place.let_go("c", "d")
    until(lambda: len(answers.asked) == 7)
    assert answers.asked[5:] == ["v", "w"] and older.is_running and newer.is_running
    place.let_go("e", "v", "w")
    until(lambda: len(answers.asked) == 8)
    place.let_go("x")
    assert [rollout.text for rollout in collect(newer, 0, 3)] == ["v", "w", "x"]
    assert [rollout.text for rollout in collect(older, 0, 5)] == ["a", "b", "c", "d", "e"]
    assert answers.most_at_once == 3 and not older.is_running and not newer.is_running
    until(lambda: place.servers.all[0].asked == 0)
    assert place.servers.listeners == []


def test_servers_finish_with_old_weights_and_one_that_comes_back_waits_for_the_next_sync(place: Place) -> None:
    (stays, goes), (answers, others) = place.servers.all, place.answers
    for server in (stays, goes):
        place.has_weights(server, 0)
    generation = place.generate("abcd", 0)
    until(lambda: len(answers.asked) + len(others.asked) == 4)
    lost = list(others.asked)
    assert len(lost) == 2
    place.lose(goes)
    until(lambda: len(answers.asked) == 4)
    place.comes_back(goes)
    assert place.servers.without_weights(0) == [goes]
    place.let_go("a", "b", "c", "d")
    assert {rollout.weights_version for rollout in collect(generation, newest=1, number=4)} == {0}


def test_when_no_server_has_the_old_weights_any_more_the_trainers_finish_it(place: Place) -> None:
    [server, _], [answers, _] = place.servers.all, place.answers
    place.has_weights(server, 0)
    generation = place.generate("abc", 0)
    until(lambda: len(answers.asked) == 3)
    place.let_go("a")
    assert generation.next(newest=1).finished[0].weights_version == 0
    place.lose(server)
    place.comes_back(server)
    progress: Progress = generation.next(newest=1)
    assert progress.needs_weights and not progress.finished and generation.is_running
    place.has_weights(server, 1)  # sent because of the progress
    until(lambda: len(answers.asked) == 5)
    place.let_go("b", "c")
    assert [rollout.weights_version for rollout in collect(generation, newest=1, number=2)] == [1, 1]


def test_as_long_as_the_trainers_weights_are_those_of_the_generation_a_server_gets_them_at_once(place: Place) -> None:
    stays, comes = place.servers.all
    place.has_weights(stays, 0)
    generation = place.generate("ab", 0)
    place.comes_back(comes)
    assert generation.next(newest=0).needs_weights
    place.has_weights(comes, 0)
    until(lambda: sum(len(answers.asked) for answers in place.answers) == 2)
    place.let_go("a", "b")
    collect(generation, newest=0, number=2)


def test_nobody_is_missed_before_completions_are_wanted(place: Place) -> None:
    """A server may be away for longer than --vllm_server_timeout while the trainer trains."""
    [server, _], [answers, _] = place.servers.all, place.answers
    place.has_weights(server, 0)
    generation = place.generate("a", 0)
    until(lambda: answers.asked)
    place.lose(server)
    time.sleep(1.5)  # the timeout is 0.5 s
    assert generation.is_running
    place.has_weights(server, 1)
    until(lambda: len(answers.asked) == 2)
    place.let_go("a")
    collect(generation, newest=1, number=1)

    generation = place.generate("b", 1)
    place.lose(server)
    with pytest.raises(NoServer, match="no rollout server has answered"):
        generation.next(newest=1)


@pytest.mark.parametrize("refusal", SERVER_UNUSABLE)
def test_a_server_that_cannot_serve_this_run_is_out(place: Place, refusal: int) -> None:
    """It is no fault of the prompt, which would end the run the second time."""
    (fails, well), (refusing, answers) = place.servers.all, place.answers
    refusing.refusal = refusal
    place.has_weights(fails, 0)
    generation = place.generate("abcd", 0)
    until(lambda: fails.is_out)
    assert str(refusal) in fails.why_out and len(refusing.asked) == 4 and generation.is_running
    place.has_weights(well, 0)
    until(lambda: len(answers.asked) == 4)
    place.let_go("a", "b", "c", "d")
    assert [rollout.text for rollout in collect(generation, 0, 4)] == ["a", "b", "c", "d"]


def test_what_nobody_waits_for_is_given_up(place: Place) -> None:
    [server, _], [answers, _] = place.servers.all, place.answers
    place.has_weights(server, 0)
    generation = place.generate("ab", 0)
    until(lambda: len(answers.asked) == 2)
    place.background.run(generation.stop())
    until(lambda: sorted(answers.given_up) == ["a", "b"])
    assert not generation.is_running
    with pytest.raises(RuntimeError, match="the run has ended"):
        generation.next(newest=0)

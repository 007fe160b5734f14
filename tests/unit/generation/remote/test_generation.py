"""Generations that continue while the trainer does something else, with a real event loop and real web servers that
respond when the test releases a request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.generation.remote.event_loop import EventLoopThread
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import NoServer, Server, Servers
from swift_megatron_grpo.protocol.messages import INVALID, SERVER_UNUSABLE, Completion, Routes
from swift_megatron_grpo.types import Prompt, Rollout
from tests.unit.arguments.test_server_checks import CONFIG, status

SAMPLING = SamplingConfig(1.0, 1.0, -1, 1.0, max_completion_length=4, stop_words=())


@dataclass
class FakeServer:
    """A server that holds every request until it is released."""

    received: list[str] = field(default_factory=list)  # questions, in order of arrival
    cancelled: list[str] = field(default_factory=list)  # questions whose client disconnected
    refusal: int | None = None  # an HTTP status to respond with at once
    wrong: dict[str, Any] = field(default_factory=dict)  # fields of its completions, or of their JSON
    most_at_once: int = 0
    held: dict[str, asyncio.Event] = field(default_factory=dict)

    batches: list[int] = field(default_factory=list)  # their sizes
    refuses_batches: bool = False
    ends_early: bool = False  # its batches end without an answer

    async def generate(self, request: web.Request) -> web.Response:
        answer = await self._answer(await request.json())
        return web.json_response(answer.get("completion", answer), status=answer.get("status", 200))

    async def generate_batch(self, request: web.Request) -> web.StreamResponse:
        payloads = (await request.json())["requests"]
        if self.refuses_batches:
            return web.json_response({"detail": "a request is at fault"}, status=INVALID)
        self.batches.append(len(payloads))
        response = web.StreamResponse()
        await response.prepare(request)

        if self.ends_early:
            return response

        async def answer(place: int) -> None:
            line = {"place": place} | await self._answer(payloads[place])
            await response.write(json.dumps(line).encode() + b"\n")

        await asyncio.gather(*(answer(place) for place in range(len(payloads))))
        return response

    async def _answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        question = payload["request"]["messages"][0]["content"]
        self.received.append(question)
        if self.refusal is not None:
            return {"detail": "no", "status": self.refusal}
        self.held[question] = asyncio.Event()
        self.most_at_once = max(self.most_at_once, len(self.held))
        try:
            await self.held[question].wait()
        except asyncio.CancelledError:
            self.cancelled.append(question)
            raise
        finally:
            del self.held[question]
        completion = Completion([1], [2], [-1.0], question, "stop", payload["weights_version"])
        in_json = {name: value for name, value in self.wrong.items() if isinstance(value, str)}
        wrong = {name: value for name, value in self.wrong.items() if name not in in_json}
        return {"completion": replace(completion, **wrong).to_json() | in_json}


class Cluster:
    """Two fake servers, and the trainer's view of them in the same event loop."""

    def __init__(self) -> None:
        self.events = EventLoopThread("test")
        self.fakes = [FakeServer(), FakeServer()]
        self.generations: list[RemoteGeneration] = []
        self.events.run(self._open())

    async def _open(self) -> None:
        self._runners, urls = [], []
        for fake in self.fakes:
            app = web.Application()
            app.router.add_post(Routes.GENERATE, fake.generate)
            app.router.add_post(Routes.GENERATE_BATCH, fake.generate_batch)
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
            self.events.run(generation.stop())
        self.events.run(self._close())
        self.events.stop()

    async def _close(self) -> None:
        await self.servers.close()
        for runner in self._runners:
            await runner.cleanup()

    def receive_weights(self, server: Server, version: int, slots: int = 8) -> None:
        async def receive() -> None:
            server.status = status(max_num_seqs=slots)
            server.received(version, collect_checksums=True)
            await self.servers.mark_verified(version)

        self.events.run(receive())

    def lose(self, server: Server) -> None:
        async def lose() -> None:
            self.servers.mark_lost(server, "the test takes it away")

        self.events.run(lose())

    def bring_back(self, server: Server) -> None:
        async def bring_back() -> None:
            self.servers._handle_status(server, status(instance="another"))

        self.events.run(bring_back())

    def answer_status(self, server: Server, instance: str) -> None:
        async def answer() -> None:
            self.servers._handle_status(server, status(instance=instance))

        self.events.run(answer())

    def generate(
        self, names: str, version: int, older: list[RemoteGeneration] | None = None, group_size: int = 1
    ) -> RemoteGeneration:
        """Start a generation of one completion per letter."""
        prompts = [Prompt(name, {"messages": [{"role": "user", "content": name}]}) for name in names]
        requests = requests_for(prompts, 1, None, version)
        generation = RemoteGeneration(self.events, self.servers, requests, group_size, SAMPLING, version, older or [])
        self.generations.append(generation)
        return generation

    def release(self, *names: str) -> None:
        async def release() -> None:
            for name in names:
                for fake in self.fakes:
                    if name in fake.held:
                        fake.held[name].set()

        self.events.run(release())


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def collect(generation: RemoteGeneration, newest: int, number: int) -> list[Rollout]:
    rollouts: dict[int, Rollout] = {}
    while len(rollouts) < number:
        progress = generation.next(newest)
        assert not progress.needs_weights
        rollouts |= progress.finished
    return [rollouts[index] for index in sorted(rollouts)]


def texts(rollouts: list[Rollout]) -> set[str]:
    return {rollout.text for rollout in rollouts}


def test_the_older_generation_is_served_first_and_both_share_the_slots(cluster: Cluster) -> None:
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0, slots=2)  # and one more is queued there
    older = cluster.generate("abcde", 0)
    wait_until(lambda: len(fake.received) == 3)
    newer = cluster.generate("vwx", 0, [older])
    time.sleep(0.1)
    assert fake.received == ["a", "b", "c"]
    cluster.release("a", "b")
    wait_until(lambda: len(fake.received) == 5)
    assert fake.received[3:] == ["d", "e"] and not older.has_waiting
    cluster.release("c", "d")
    wait_until(lambda: len(fake.received) == 7)
    assert fake.received[5:] == ["v", "w"] and older.is_running and newer.is_running
    cluster.release("e", "v", "w")
    wait_until(lambda: len(fake.received) == 8)
    cluster.release("x")
    assert [rollout.text for rollout in collect(newer, 0, 3)] == ["v", "w", "x"]
    assert [rollout.text for rollout in collect(older, 0, 5)] == ["a", "b", "c", "d", "e"]
    assert fake.most_at_once == 3 and not older.is_running and not newer.is_running
    wait_until(lambda: cluster.servers.all[0].requests_in_flight == 0)
    assert cluster.servers.listeners == []


def test_servers_finish_with_old_weights_and_a_returning_server_waits_for_the_next_sync(cluster: Cluster) -> None:
    (kept, lost), (fake, other) = cluster.servers.all, cluster.fakes
    for server in (kept, lost):
        cluster.receive_weights(server, 0)
    generation = cluster.generate("abcd", 0)
    wait_until(lambda: len(fake.received) + len(other.received) == 4)
    assert len(other.received) == 2
    cluster.lose(lost)
    wait_until(lambda: len(fake.received) == 4)
    cluster.bring_back(lost)
    assert cluster.servers.without_weights(0) == [lost]
    cluster.release("a", "b", "c", "d")
    assert {rollout.weights_version for rollout in collect(generation, newest=1, number=4)} == {0}


def test_the_trainers_weights_finish_a_generation_whose_weights_no_server_has(cluster: Cluster) -> None:
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0)
    generation = cluster.generate("abc", 0)
    wait_until(lambda: len(fake.received) == 3)
    cluster.release("a")
    assert generation.next(newest=1).finished[0].weights_version == 0
    cluster.lose(server)
    cluster.bring_back(server)
    progress = generation.next(newest=1)
    assert progress.needs_weights and not progress.finished and generation.is_running
    cluster.receive_weights(server, 1)  # as the trainer does when needs_weights is True
    wait_until(lambda: len(fake.received) == 5)
    cluster.release("b", "c")
    assert [rollout.weights_version for rollout in collect(generation, newest=1, number=2)] == [1, 1]


def test_a_new_server_gets_the_weights_of_a_generation_at_once_while_they_are_the_newest(cluster: Cluster) -> None:
    present, new = cluster.servers.all
    cluster.receive_weights(present, 0)
    generation = cluster.generate("ab", 0)
    cluster.bring_back(new)
    assert generation.next(newest=0).needs_weights
    cluster.receive_weights(new, 0)
    wait_until(lambda: sum(len(fake.received) for fake in cluster.fakes) == 2)
    cluster.release("a", "b")
    collect(generation, newest=0, number=2)


@pytest.mark.alone
def test_the_server_timeout_applies_only_while_the_trainer_waits(cluster: Cluster) -> None:
    """A server may be lost for longer than --vllm_server_timeout while the trainer trains."""
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0)
    generation = cluster.generate("a", 0)
    wait_until(lambda: fake.received)
    cluster.lose(server)
    time.sleep(1.5)  # the timeout is 0.5 s
    assert generation.is_running
    cluster.receive_weights(server, 1)
    wait_until(lambda: len(fake.received) == 2)
    cluster.release("a")
    collect(generation, newest=1, number=1)

    generation = cluster.generate("b", 1)
    cluster.lose(server)
    with pytest.raises(NoServer, match="no rollout server has answered"):
        generation.next(newest=1)


@pytest.mark.parametrize("refusal", SERVER_UNUSABLE)
def test_a_server_that_cannot_serve_this_run_is_lost(cluster: Cluster, refusal: int) -> None:
    """It does not count as a failed attempt of the prompt, of which the second would end the run."""
    (failing, healthy), (refusing, fake) = cluster.servers.all, cluster.fakes
    refusing.refusal = refusal
    cluster.receive_weights(failing, 0)
    generation = cluster.generate("abcd", 0)
    wait_until(lambda: failing.is_lost)
    assert str(refusal) in failing.loss_reason and len(refusing.received) == 4 and generation.is_running
    cluster.receive_weights(healthy, 0)
    wait_until(lambda: len(fake.received) == 4)
    cluster.release("a", "b", "c", "d")
    assert [rollout.text for rollout in collect(generation, 0, 4)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"completion_ids": [700]}, "its completion of prompt a is invalid: a token is not in the vocabulary of 7"),
        ({"logprobs": [float("nan")]}, "a log-prob is not finite"),
        ({"completion_ids": [2] * 5, "logprobs": [-1.0] * 5}, "more than --max_completion_length 4"),
        ({"completion_ids": "no base64"}, "its completion cannot be read: InvalidMessage"),
        ({"finish_reason": "abort"}, "its finish_reason is 'abort'"),
    ],
)
def test_a_server_that_sends_an_impossible_completion_is_not_used_until_it_is_restarted(
    cluster: Cluster, wrong: dict[str, Any], reason: str
) -> None:
    (broken, healthy), (liar, fake) = cluster.servers.all, cluster.fakes
    liar.wrong = wrong
    cluster.servers.config = replace(cluster.servers.config, model={"vocab_size": 7})
    cluster.receive_weights(broken, 0)
    generation = cluster.generate("a", 0)
    wait_until(lambda: liar.received)
    cluster.release("a")
    wait_until(lambda: broken.is_lost)
    assert reason in broken.loss_reason and "not used again before it is restarted" in broken.loss_reason
    cluster.answer_status(broken, "x")  # it still runs, and answers the next status request
    assert broken.is_lost
    cluster.receive_weights(healthy, 0)
    wait_until(lambda: fake.received)
    cluster.release("a")
    assert [rollout.completion_ids for rollout in collect(generation, 0, 1)] == [[2]]
    cluster.answer_status(broken, "restarted")
    assert not broken.is_lost


def test_servers_that_encode_a_prompt_differently_end_the_run(cluster: Cluster) -> None:
    """Either of them may be right."""
    fake, other = cluster.fakes
    other.wrong = {"prompt_ids": [4]}
    for server in cluster.servers.all:
        cluster.receive_weights(server, 0, slots=1)
    generation = cluster.generate("ab", 0, group_size=2)
    wait_until(lambda: fake.received and other.received)
    cluster.release("a", "b")
    with pytest.raises(
        RuntimeError, match=r"http://.* and http://.* encode prompt [ab] differently; start all rollout servers"
    ):
        while True:
            generation.next(newest=0)


def test_stopping_a_generation_cancels_its_requests(cluster: Cluster) -> None:
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0)
    generation = cluster.generate("ab", 0)
    wait_until(lambda: len(fake.received) == 2)
    cluster.events.run(generation.stop())
    wait_until(lambda: sorted(fake.cancelled) == ["a", "b"])
    assert not generation.is_running
    with pytest.raises(RuntimeError, match="the run has ended"):
        generation.next(newest=0)


def test_requests_are_sent_in_batches_and_each_is_returned_when_it_ends(cluster: Cluster) -> None:
    first, _ = cluster.servers.all
    cluster.receive_weights(first, 0, slots=4)
    generation = cluster.generate("abcdefg", 0)
    wait_until(lambda: len(cluster.fakes[0].held) == 5)  # its slots, and one that waits there
    assert cluster.fakes[0].batches == [5]
    cluster.release("c")
    assert texts(collect(generation, 0, 1)) == {"c"}  # while the others of its batch are not finished
    wait_until(lambda: "f" in cluster.fakes[0].held)
    assert cluster.fakes[0].batches == [5, 1] and first.requests_in_flight == 5
    cluster.release("a", "b", "d", "e", "f")
    wait_until(lambda: "g" in cluster.fakes[0].held)
    cluster.release("g")
    assert texts(collect(generation, 0, 6)) == set("abdefg")
    wait_until(lambda: first.requests_in_flight == 0)


def test_requests_of_a_refused_batch_are_sent_one_by_one(cluster: Cluster) -> None:
    cluster.fakes[0].refuses_batches = True
    first, _ = cluster.servers.all
    cluster.receive_weights(first, 0)
    generation = cluster.generate("abc", 0)
    wait_until(lambda: set(cluster.fakes[0].held) == set("abc"))
    cluster.release("a", "b", "c")
    assert texts(collect(generation, 0, 3)) == set("abc")
    wait_until(lambda: first.requests_in_flight == 0)
    assert cluster.fakes[0].batches == []


def test_a_batch_that_ends_early_loses_the_server_and_its_requests_are_retried(cluster: Cluster) -> None:
    cluster.fakes[0].ends_early = True
    first, second = cluster.servers.all
    cluster.receive_weights(first, 0)
    generation = cluster.generate("ab", 0)
    wait_until(lambda: first.is_lost)
    assert "ended before 2 of its completions" in first.loss_reason and first.requests_in_flight == 0
    cluster.receive_weights(second, 0)
    wait_until(lambda: set(cluster.fakes[1].held) == set("ab"))
    cluster.release("a", "b")
    assert texts(collect(generation, 0, 2)) == {"a", "b"}

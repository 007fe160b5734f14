"""Real web servers that respond when the test releases a request, and the trainer's view of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.generation.protocol.messages import INVALID, Completion, Routes
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import EventLoopThread, Server, Servers
from swift_megatron_grpo.settings.config import SamplingConfig
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
    lacks: int = 0  # completions of each group

    async def generate_batch(self, request: web.Request) -> web.StreamResponse:
        payloads = (await request.json())["requests"]
        if self.refuses_batches and len(payloads) > 1:
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
        others = [replace(completion, text=f"{question}{place}") for place in range(1, payload["group"] or 1)]
        completion = replace(completion, others=tuple(others[self.lacks :]))
        in_json = {name: value for name, value in self.wrong.items() if isinstance(value, str)}
        wrong = {name: value for name, value in self.wrong.items() if name not in in_json}
        return {"completion": replace(completion, **wrong).to_json() | in_json}


class Cluster:
    """Two fake servers, and the trainer's view of them in the same event loop."""

    def __init__(self, updates_in_flight: bool = False) -> None:
        self.updates_in_flight = updates_in_flight
        self.events = EventLoopThread("test")
        self.fakes = [FakeServer(), FakeServer()]
        self.generations: list[RemoteGeneration] = []
        self.events.run(self._open())

    async def _open(self) -> None:
        self._runners, urls = [], []
        for fake in self.fakes:
            app = web.Application()
            app.router.add_post(Routes.GENERATE_BATCH, fake.generate_batch)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        config = replace(CONFIG, urls=tuple(urls), group_ports=(0, 0), request_timeout=60, timeout=0.5)
        self.servers = Servers(replace(config, updates_in_flight=self.updates_in_flight))
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

    def update_in_flight(self, server: Server, version: int, verified: bool = True) -> None:
        """Let newer weights arrive at a server that generates."""

        async def receive() -> None:
            self.servers.newest = version
            server.received(version, collect_checksums=False, in_flight=True)
            if verified:
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
        self,
        names: str,
        version: int,
        older: list[RemoteGeneration] | None = None,
        group_size: int = 1,
        whole: int | None = None,
    ) -> RemoteGeneration:
        """Start a generation of one completion per letter, or of `whole` that a scheduler answers together."""
        prompts = [Prompt(name, {"messages": [{"role": "user", "content": name}]}) for name in names]
        requests = requests_for(prompts, whole or 1, None, version)
        generation = RemoteGeneration(
            self.events, self.servers, requests, whole or group_size, SAMPLING, version, older or [],
            whole_groups=whole is not None,
        )  # fmt: skip
        self.generations.append(generation)
        return generation

    def release(self, *names: str) -> None:
        async def release() -> None:
            for name in names:
                for fake in self.fakes:
                    if name in fake.held:
                        fake.held[name].set()

        self.events.run(release())


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

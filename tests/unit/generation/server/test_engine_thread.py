"""The end of an engine that runs in a thread: no request and no command waits for it, and a failure is logged.

A stand-in takes the place of vLLM's engine. tests/programs/e2e/engine_in_thread.py runs the real one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from swift.utils import get_logger

from swift_megatron_grpo.generation.server import engine_process, engine_thread
from swift_megatron_grpo.generation.server.engine_thread import EngineFailed, EngineThread


@dataclass
class StandIn:
    """An engine that finishes no request."""

    requests: list[str] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)  # that have called it
    first_step: list[str] | None = None  # its requests
    error: BaseException | None = None  # of a step
    output_processor: Any = None
    shut_down: bool = False

    @property
    def engine_core(self) -> Any:
        core = SimpleNamespace(scheduler=SimpleNamespace(has_requests=self.has_unfinished_requests), batch_queue=None)
        return SimpleNamespace(engine_core=core, shutdown=lambda: setattr(self, "shut_down", True))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        self.requests.append(request_id)

    def abort_request(self, request_ids: list[str]) -> None:
        self.requests = [request for request in self.requests if request not in request_ids]

    def step(self) -> list[Any]:
        self.threads.add(threading.current_thread())
        self.first_step = self.first_step or list(self.requests)
        if self.error is not None:
            raise self.error
        return []

    def collective_rpc(self, error: BaseException, *_: Any) -> None:
        raise error


Work = Callable[[EngineThread, StandIn], Coroutine[Any, Any, None]]


def run(work: Work) -> None:
    async def with_engine() -> None:
        engine = StandIn()
        build: Any = lambda *_: engine  # noqa: E731
        await asyncio.wait_for(work(EngineThread(SimpleNamespace(model_config=None), False, build), engine), timeout=10)

    asyncio.run(with_engine())


async def failure_of(work: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(EngineFailed) as raised:
        await work
    return str(raised.value)


async def generate(thread: EngineThread, request: str) -> None:
    async for _ in thread.generate(None, None, request):
        pass


async def start(thread: EngineThread, engine: StandIn) -> asyncio.Task[str]:
    """Start a request, which the engine then has."""
    waiting = asyncio.create_task(failure_of(generate(thread, "a")))
    while not engine.threads:
        await asyncio.sleep(0.01)
    return waiting


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), SystemExit("a worker exits")])
def test_a_failed_step_ends_requests_and_commands_and_logs_its_traceback(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(thread: EngineThread, engine: StandIn) -> None:
        waiting = await start(thread, engine)
        assert engine.threads == {thread._thread} and not thread.errored
        engine.error = error
        expected = f"{type(error).__name__}: {error}"
        assert await waiting == expected and thread.errored
        assert await failure_of(generate(thread, "b")) == expected
        assert await failure_of(thread.reset_prefix_cache()) == expected
        thread.shutdown()
        assert not thread._thread.is_alive()

    get_logger().addHandler(caplog.handler)
    run(work)
    get_logger().removeHandler(caplog.handler)
    assert "in step\n    raise self.error" in caplog.text and str(error) in caplog.text


def test_a_command_that_exits_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def work(thread: EngineThread, engine: StandIn) -> None:
        with pytest.raises(LookupError, match="no such method"):
            await thread.collective_rpc(LookupError("no such method"))
        assert not thread.errored
        waiting = await start(thread, engine)
        assert await failure_of(thread.collective_rpc(SystemExit("bye"))) == "SystemExit: bye"
        assert await waiting == "SystemExit: bye" and thread.errored

    run(work)


def test_a_shutdown_ends_requests_in_flight_and_commands_that_follow() -> None:
    async def work(thread: EngineThread, engine: StandIn) -> None:
        waiting = await start(thread, engine)
        thread.shutdown()
        assert not thread._thread.is_alive() and engine.shut_down
        assert await waiting == "the engine was shut down"
        assert await failure_of(thread.list_loras()) == "the engine was shut down"

    run(work)


@pytest.mark.parametrize(("gap", "most", "together"), [(1.0, 9.0, True), (0.0, 9.0, False), (1.0, 0.0, False)])
def test_an_idle_engine_waits_for_requests_that_arrive_one_by_one(
    gap: float, most: float, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_GATHERING_SECONDS", gap)
    monkeypatch.setattr(engine_thread, "_MOST_GATHERING_SECONDS", most)

    async def work(thread: EngineThread, engine: StandIn) -> None:
        waiting = []
        for request in ("a", "b", "c"):
            waiting.append(asyncio.create_task(failure_of(generate(thread, request))))
            await asyncio.sleep(0.1)
        while engine.first_step is None:
            await asyncio.sleep(0.01)
        assert engine.first_step == (["a", "b", "c"] if together else ["a"])
        thread.shutdown()
        await asyncio.gather(*waiting)

    run(work)


@dataclass
class Draining:
    """An engine with batches on the device, whose blocks are in use."""

    batches: int

    async def reset_prefix_cache(self) -> bool:
        self.batches -= 1
        return self.batches < 0


def test_old_weights_prefix_cache_is_reset_once_no_batch_is_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Draining(batches=2)
    asyncio.run(engine_process.reset_prefix_cache(engine))
    assert engine.batches == -1
    monkeypatch.setattr(engine_process, "_DRAIN_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="values of older weights would stay"):
        asyncio.run(engine_process.reset_prefix_cache(Draining(batches=10**9)))

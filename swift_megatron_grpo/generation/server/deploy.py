"""`swift rollout` for this package's trainer: its processes, its web server, and ms-swift's routes behind the gate."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from multiprocessing import Pipe, Process
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.utils import get_logger

from swift_megatron_grpo.generation.protocol.messages import INVALID
from swift_megatron_grpo.generation.server.arguments import LOOPBACK, GRPORolloutArguments
from swift_megatron_grpo.generation.server.engine_process import run_engine_process
from swift_megatron_grpo.generation.server.gate import Gate, bounded_protocol
from swift_megatron_grpo.generation.server.health import EngineHealth
from swift_megatron_grpo.generation.server.pipe import Commands
from swift_megatron_grpo.generation.server.routes import RolloutRoutes, refuse_if_failed
from swift_megatron_grpo.generation.server.schema import ContentLimits
from swift_megatron_grpo.generation.server.signals import kill_children
from swift_megatron_grpo.runtime.open_files import allow_open_files

logger = get_logger()
_OTHER_FILES = 1024  # open files besides connections
_SHUTDOWN_SECONDS = 10  # for requests in progress
Handler = Callable[..., Coroutine[Any, Any, Any]]
# ms-swift's handlers that share its pipe, and wait for the engine in the web server's event loop. Two at a time would
# read each other's results, and while one waits, the server would neither serve others nor detect a stuck engine.
STOCK_METHODS = (
    "get_model_state_keys", "init_communicator", "update_named_param", "update_adapter_flattened_param",
    "update_adapter_param", "update_flattened_params", "process_weights_after_loading", "reset_prefix_cache",
    "reset_encoder_cache", "reset_mm_cache", "close_communicator", "infer",
)  # fmt: skip


class GRPORolloutDeploy(SwiftRolloutDeploy):
    args_class = GRPORolloutArguments
    args: GRPORolloutArguments

    # set once the engine process has started, and once it has described its engine
    commands: Commands
    content_limits: ContentLimits
    web: uvicorn.Server

    def _start_data_parallel_workers(self) -> None:
        """Start one process: vLLM's asynchronous engine creates its data-parallel ranks itself."""
        stock_pipe, worker_stock_pipe = Pipe()
        commands, worker_commands = socket.socketpair()
        worker_ends = (worker_stock_pipe, worker_commands)
        process = Process(target=run_engine_process, args=(self.args, self.master_port, *worker_ends))
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, until the process leaves this group
        process.start()
        signal.signal(signal.SIGINT, previous)
        for end in worker_ends:  # open in the child only, so that each side detects the other's exit
            end.close()
        self.connections.append(stock_pipe)
        self.processes.append(process)
        self.commands = Commands(commands)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with super().lifespan(app):
            await self.commands.open()
            watching = [asyncio.create_task(self._watch_engine())]
            engine_settings = await self.commands.call("describe")
            self.content_limits = self.args.content_limits(engine_settings)
            await self.commands.call("probe")  # nothing is answered before the engine has generated a token
            watching.append(asyncio.create_task(self._watch_health()))
            routes = RolloutRoutes(self.args, self.commands, self.engine_health, engine_settings)
            app.include_router(routes.router)
            yield
            for task in watching:
                task.cancel()
            for connection in self.connections:
                with suppress(OSError):  # the engine has exited
                    connection.send({"type": "shutdown"})

    async def _watch_engine(self) -> None:
        await self.commands.read_results()
        health = self.engine_health
        health.failure = health.failure or "the process of the vLLM engine has exited"
        logger.error(f"{health.failure}; this server shuts down")
        self.web.should_exit = True

    async def _watch_health(self) -> None:
        """Kill an engine that is stuck: its clients fail over, and a supervisor can start this server again."""
        reason = self.engine_health.failure = await self.engine_health.wait_until_stuck()
        self.commands.reason_of_exit = reason
        kill_children()

    def run(self) -> None:
        """Serve until a signal arrives or the engine fails."""
        self._warn_if_unauthenticated()
        args = self.args
        allow_open_files(args.max_connections + _OTHER_FILES)
        protocol = bounded_protocol(args.max_connections, args.idle_timeout, args.max_body_bytes)
        self.web = uvicorn.Server(
            uvicorn.Config(
                self.app, host=args.host, port=args.port, log_level=args.log_level, http=protocol, ws="none",
                timeout_keep_alive=math.ceil(args.idle_timeout), timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )  # fmt: skip
        self.web.run()
        failure = self.engine_health.failure
        if failure is not None or not self.web.started:
            raise SystemExit(f"swift rollout: {failure or 'the server did not start'}")

    def _register_rl_rollout_app(self) -> None:
        one_at_a_time(self, STOCK_METHODS)
        super()._register_rl_rollout_app()
        self.app.exception_handler(RequestValidationError)(_without_values)
        args = self.args
        self.app.add_middleware(
            Gate, key=args.api_key, body_bytes=args.max_body_bytes, body_seconds=args.body_timeout,
            most_requests=args.max_requests, content=lambda: self.content_limits,
        )  # fmt: skip
        self.engine_health = EngineHealth(lambda: self.commands.call("probe"), args.health_timeout)

    def _require_api_key(self) -> Callable[[], Awaitable[None]]:
        """Return no check for ms-swift's routes: the gate has checked the key of every request."""

        async def checked() -> None: ...

        return checked

    async def health(self) -> dict[str, str]:
        """Return whether the engine generates; a server whose engine is stuck ends."""
        refuse_if_failed(self.engine_health)
        return {"status": "ok"}

    def _warn_if_unauthenticated(self) -> None:
        super()._warn_if_unauthenticated()
        if self.args.host == LOOPBACK:
            logger.info(
                f"The rollout server listens on {LOOPBACK} only. For trainers on other machines: --host and --api_key"
            )


async def _without_values(_: Request, error: Exception) -> JSONResponse:
    """Name the fields that one of ms-swift's routes refuses. FastAPI repeats their values, however large."""
    assert isinstance(error, RequestValidationError)
    problems = [f"'{'.'.join(map(str, problem['loc']))}': {problem['msg']}" for problem in error.errors()[:3]]
    return JSONResponse({"detail": "; ".join(problems)}, INVALID)


def one_at_a_time(server: Any, methods: Sequence[str]) -> None:
    """Make these handlers of a server run one after the other, outside the event loop, before they become routes."""
    turn = asyncio.Lock()

    def in_turn(handler: Handler) -> Handler:
        @wraps(handler)
        async def handle(*arguments: Any, **options: Any) -> Any:
            async with turn:
                try:
                    return await asyncio.to_thread(asyncio.run, handler(*arguments, **options))
                except TypeError as error:  # ms-swift's engine has logged an error, and returned None, not a list
                    reason = "the engine refused the request; the server's log has the reason"
                    raise HTTPException(INVALID, reason) from error

        return handle

    for name in methods:
        setattr(server, name, in_turn(getattr(server, name)))

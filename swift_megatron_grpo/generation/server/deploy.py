"""`swift rollout` with additional routes for this package's trainer. ms-swift's routes and API key check are unchanged.

One request is one completion, or one conversation with --multi_turn_scheduler; vLLM batches concurrent requests.
Weights have a version. The server generates nothing while new weights arrive, and a failed transfer leaves it without
weights.
"""

from __future__ import annotations

import asyncio
import base64
import math
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial
from multiprocessing import Pipe, Process
from typing import Annotated, Any

import psutil
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.utils import get_logger

from swift_megatron_grpo import __version__
from swift_megatron_grpo.data.images import MAX_PIXELS, check_sent, digest_of
from swift_megatron_grpo.generation.protocol.messages import (
    CONFLICT,
    ENGINE_GONE,
    INVALID,
    NO_WEIGHTS,
    PROTOCOL,
    RUN_HEADER,
    RUN_SECRET_HEADER,
    TAKEN,
    ConversationSettings,
    Routes,
    RunIdentity,
    ServerStatus,
    serves_another,
)
from swift_megatron_grpo.generation.server.arguments import LOOPBACK, GRPORolloutArguments
from swift_megatron_grpo.generation.server.batch import answer_lines
from swift_megatron_grpo.generation.server.cancel_on_disconnect import while_connected
from swift_megatron_grpo.generation.server.connections import allow_open_files, bounded_protocol
from swift_megatron_grpo.generation.server.gate import Gate, checked_body
from swift_megatron_grpo.generation.server.health import EngineHealth
from swift_megatron_grpo.generation.server.limits import ContentLimits, prompt_characters
from swift_megatron_grpo.generation.server.pipe import CommandError, Commands, EngineGone
from swift_megatron_grpo.generation.server.run_lease import RunLease
from swift_megatron_grpo.generation.server.schema import (
    GenerateBatch,
    GenerateRequest,
    JoinRequest,
    ReceiveRequest,
    ScoreRequest,
)
from swift_megatron_grpo.generation.server.stock_routes import STOCK_METHODS, one_at_a_time
from swift_megatron_grpo.generation.server.worker import run_worker
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret

logger = get_logger()
_EVERY_INTERFACE = ("", "0.0.0.0", "::")
_LONGEST_NAME = 256  # of a run
_OTHER_FILES = 1024  # open files besides connections
_SHUTDOWN_SECONDS = 10  # for requests in progress


def run_of(client: Request) -> RunIdentity | None:
    """Return the run that sends a request, None for a client without one."""
    name, secret = client.headers.get(RUN_HEADER), client.headers.get(RUN_SECRET_HEADER)
    if name is None or not secret:
        return None
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise HTTPException(INVALID, f"the header {RUN_HEADER} must be printable and short")
    return RunIdentity(name, secret)


Run = Annotated[RunIdentity | None, Depends(run_of)]


class GRPORolloutDeploy(SwiftRolloutDeploy):
    args_class = GRPORolloutArguments
    args: GRPORolloutArguments

    web: uvicorn.Server

    def __init__(self, args: list[str] | GRPORolloutArguments | None = None) -> None:
        self.instance = uuid.uuid4().hex
        self.weights_version = NO_WEIGHTS
        self.lease = RunLease()
        self.description: dict[str, Any] = {}
        self.hub: Hub | None = None  # at which the processes of the current group meet
        self.join_task: asyncio.Task[Any] | None = None
        self.failure: str | None = None  # why this server ends by itself
        super().__init__(args)

    # ---- processes

    def _start_data_parallel_workers(self) -> None:
        """Start one process: vLLM's asynchronous engine creates its data-parallel ranks itself."""
        stock_pipe, worker_stock_pipe = Pipe()
        command_pipe, worker_command_pipe = Pipe()
        worker_pipes = (worker_stock_pipe, worker_command_pipe)
        process = Process(target=run_worker, args=(self.args, 0, self.master_port, *worker_pipes))
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited; then the engine process ignores it itself
        process.start()
        signal.signal(signal.SIGINT, previous)
        for end in worker_pipes:  # open in the child only, so that each side detects the other's exit
            end.close()
        self.connections.append(stock_pipe)
        self.processes.append(process)
        self.commands = Commands(command_pipe)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with super().lifespan(app):
            watching = [asyncio.create_task(self._watch_engine())]
            self.description = await self.commands.call("describe")
            await self.commands.call("probe")  # nothing is answered before the engine has generated a token
            watching.append(asyncio.create_task(self._watch_health()))
            yield
            for task in watching:
                task.cancel()
            for connection in self.connections:
                with suppress(OSError):  # the engine has exited
                    connection.send({"type": "shutdown"})

    async def _watch_engine(self) -> None:
        await self.commands.read_results()
        self.failure = self.failure or "the process of the vLLM engine has exited"
        logger.error(f"{self.failure}; this server shuts down")
        self.web.should_exit = True

    async def _watch_health(self) -> None:
        """Kill an engine that is stuck: its clients fail over, and a supervisor can start this server again."""
        self.failure = await self.engine_health.wait_until_stuck()
        self.commands.expect_exit(self.failure)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def run(self) -> None:
        """Serve until a signal arrives or the engine fails."""
        self._warn_if_unauthenticated()
        args = self.args
        allow_open_files(args.max_connections + _OTHER_FILES)
        protocol = bounded_protocol(args.max_connections, args.idle_timeout)
        self.web = uvicorn.Server(
            uvicorn.Config(
                self.app, host=args.host, port=args.port, log_level=args.log_level, http=protocol, ws="none",
                timeout_keep_alive=math.ceil(args.idle_timeout), timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )  # fmt: skip
        self.web.run()
        if self.failure is not None or not self.web.started:
            raise SystemExit(f"swift rollout: {self.failure or 'the server did not start'}")

    # ---- routes

    def _register_rl_rollout_app(self) -> None:
        one_at_a_time(self, STOCK_METHODS)
        super()._register_rl_rollout_app()
        self.app.get(Routes.STATUS)(self.status)
        self.app.post(Routes.GENERATE)(self.generate)
        self.app.post(Routes.GENERATE_BATCH)(self.generate_batch)
        self.app.post(Routes.JOIN)(self.join)
        self.app.post(Routes.RECEIVE)(self.receive)
        self.app.post(Routes.SCORE)(self.score_text)
        self.app.put(Routes.IMAGES + "{digest}")(self.put_image)
        self.app.get(Routes.HELD_WEIGHTS)(self.held_weights)
        self.app.post(Routes.LEAVE)(self.leave)
        self.app.exception_handler(RequestValidationError)(_without_values)
        self.app.add_middleware(
            Gate, key=self.args.api_key, traffic=self.args.traffic, content=lambda: self.content_limits
        )
        self.engine_health = EngineHealth(lambda: self.commands.call("probe"), self.args.health_timeout)

    def _require_api_key(self) -> Callable[[], Awaitable[None]]:
        """Return no check for ms-swift's routes: the gate has checked the key of every request."""

        async def checked() -> None: ...

        return checked

    @cached_property
    def content_limits(self) -> ContentLimits:
        """The limits on the content of a request. They depend on the engine, which has started."""
        args, engine = self.args, self.description
        return ContentLimits(
            nesting=args.max_nesting,
            messages=args.max_messages,
            prompt_characters=prompt_characters(args.max_prompt_characters, engine["max_model_len"]),
            max_model_len=engine["max_model_len"],
            vocab_size=engine["vocab_size"],
            accepts_media=engine["accepts_media"],
        )

    async def health(self) -> dict[str, str]:
        """Return whether the engine generates; a server whose engine is stuck ends."""
        if self.failure is not None:
            raise HTTPException(ENGINE_GONE, self.failure)
        return {"status": "ok"}

    async def status(self, run: Run) -> dict[str, Any]:
        """Return the server's status. A run that requests it acquires the lease if no other run holds it."""
        await self.health()
        now = time.monotonic()
        if self.lease.touch(run, now):
            self.weights_version, self.join_task = NO_WEIGHTS, None  # they belong to another run
        return asdict(
            ServerStatus(
                plugin=__version__,
                protocol=PROTOCOL,
                instance=self.instance,
                run=self.lease.holder(now),
                weights_version=self.weights_version,
                world_size=self._world_size,
                max_model_len=self.description["max_model_len"],
                max_num_seqs=self.description["max_num_seqs"],
                max_logprobs=self.description["max_logprobs"],
                enable_lora=self.args.vllm_enable_lora,
                max_lora_rank=self.args.vllm_max_lora_rank,
                has_vision_tower=self.description["has_vision_tower"],
                images_per_prompt=self.description["images_per_prompt"],
                quantization=self.args.rollout_quantization,
                returns_experts=self.args.returns_experts,
                conversations=self._conversation_settings,
                model=self.description["model"],
            )
        )

    async def generate(self, client: Request, run: Run) -> dict[str, Any]:
        """Generate a completion with the weights that the trainer expects."""
        body: GenerateRequest = checked_body(client.scope)
        self._require_weights(run, body.weights_version)
        return await while_connected(client, self._complete(run, body))

    async def generate_batch(self, client: Request, run: Run) -> StreamingResponse:
        """Generate completions, and send each as soon as it ends. Starlette cancels the rest if the client leaves."""
        body: GenerateBatch = checked_body(client.scope)
        for version in {request.weights_version for request in body.requests}:
            self._require_weights(run, version)
        lines = answer_lines(body.requests, partial(self._complete, run))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _complete(self, run: RunIdentity | None, body: GenerateRequest) -> dict[str, Any]:
        self._require_weights(run, body.weights_version)  # again: the event loop has served others in between
        included = {"request", "sampling", "tokens_of_all_turns", "image_digests", "experts"}
        arguments = body.model_dump(include=included, exclude_unset=True)
        completion = await self._call_engine("generate", **arguments)
        self.engine_health.record_token()
        return {**completion, "weights_version": body.weights_version}

    async def put_image(self, digest: str, client: Request, run: Run) -> dict[str, Any]:
        """Keep an image, which requests may name by its digest until others need the room."""
        self._require_lease(run)
        content = await client.body()
        if not self.content_limits.accepts_media:
            raise HTTPException(INVALID, "this server's model takes text only")
        if digest_of(content) != digest:
            raise HTTPException(INVALID, "the body does not have the digest in the path")
        try:
            check_sent(content, MAX_PIXELS)
        except ValueError as error:
            raise HTTPException(INVALID, f"the body {error}") from None
        return await self._call_engine("put_image", digest=digest, image=base64.b64encode(content).decode("ascii"))

    async def score_text(self, client: Request, run: Run) -> dict[str, Any]:
        """Return the log-probs of every token but the first, from each replica of the model."""
        body: ScoreRequest = checked_body(client.scope)
        self._require_weights(run, body.weights_version)
        return await self._call_engine("score_text", tokens=body.tokens, image=body.image)

    async def held_weights(self, run: Run) -> dict[str, Any]:
        """Return what each worker has of the weights that it received last."""
        if run is not None:  # a client without a run may read them
            self._require_lease(run)
        return await self._call_engine("held_weights")

    async def leave(self, run: Run) -> dict[str, Any]:
        """Release the lease, so that the next run need not wait for it to expire."""
        self.lease.release(run)
        return {}

    def _require_weights(self, run: RunIdentity | None, version: int) -> None:
        self._require_lease(run)
        if self.weights_version == NO_WEIGHTS or self.weights_version != version:
            raise HTTPException(CONFLICT, f"this server has weights {self.weights_version}, not {version}")

    def _require_lease(self, run: RunIdentity | None) -> None:
        self._refuse_if_taken(run)
        if not self.lease.is_held_by(run):
            raise HTTPException(CONFLICT, f"this server has no weights of this run; POST {Routes.JOIN} first")

    def _refuse_if_taken(self, run: RunIdentity | None) -> None:
        holder = self.lease.holder(time.monotonic())
        if holder is not None and not self.lease.is_held_by(run):
            raise HTTPException(TAKEN, serves_another(holder))

    async def join(self, client: Request, run: Run) -> dict[str, Any]:
        """Open a rendezvous, to which the trainer connects next. It replaces an earlier one."""
        body: JoinRequest = checked_body(client.scope)
        if run is None:
            raise HTTPException(INVALID, f"the headers {RUN_HEADER} and {RUN_SECRET_HEADER} are missing")
        self._refuse_if_taken(run)
        self.lease.touch(run, time.monotonic())
        self.weights_version = NO_WEIGHTS
        everywhere = self.args.host in _EVERY_INTERFACE
        if self.hub is not None:
            self.hub.close()
        size, secret = self._world_size + 1, new_secret()
        try:
            self.hub = Hub(self.args.host or "::", body.port, size, secret)
        except OSError as error:
            reason = f"'port': cannot listen on it: {error.strerror}; use 0, any free port"
            raise HTTPException(INVALID, reason) from error
        host = body.host if everywhere else self.args.host
        rendezvous = Rendezvous(host, self.hub.port, size, secret, body.timeout)
        self.join_task = asyncio.create_task(self._without_tokens("join", rendezvous=asdict(rendezvous)))
        self.join_task.add_done_callback(_log_failure)
        return asdict(rendezvous) | {"host": body.host}

    async def receive(self, client: Request, run: Run) -> dict[str, Any]:
        """Receive the weights that the trainer is sending; respond once all are loaded."""
        body: ReceiveRequest = checked_body(client.scope)
        self._require_lease(run)
        if self.join_task is None:
            raise HTTPException(CONFLICT, f"no trainer has joined this server; POST {Routes.JOIN} first")
        self.weights_version = NO_WEIGHTS
        with _engine_errors():
            try:
                await self.join_task
                report: dict[str, Any] = await self._without_tokens(
                    "receive", lora=body.lora, collect_checksums=body.collect_checksums
                )
            except CommandError:
                self.join_task = None  # the workers have left the group
                raise
        if self.lease.is_held_by(run):
            self.weights_version = body.version
        return report

    async def _without_tokens(self, command: str, **arguments: Any) -> Any:
        """Run a command during which the engine generates nothing."""
        with self.engine_health.suspended():
            return await self.commands.call(command, **arguments)

    async def _call_engine(self, command: str, **arguments: Any) -> dict[str, Any]:
        with _engine_errors():
            result: dict[str, Any] = await self.commands.call(command, **arguments)
            return result

    @property
    def _conversation_settings(self) -> ConversationSettings | None:
        args = self.args
        if not args.multi_turn_scheduler:
            return None
        return ConversationSettings(args.multi_turn_scheduler, args.max_turns, args.gym_env, bool(args.use_gym_env))

    @property
    def _world_size(self) -> int:
        size: int = self.args.vllm_tensor_parallel_size * self.args.vllm_data_parallel_size
        return size

    # ---- access

    def _warn_if_unauthenticated(self) -> None:
        super()._warn_if_unauthenticated()
        if self.args.host == LOOPBACK:
            logger.info(
                f"The rollout server listens on {LOOPBACK} only. For trainers on other machines: --host and --api_key"
            )


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise HTTPException(error.status, str(error)) from error
    except EngineGone as error:
        raise HTTPException(ENGINE_GONE, str(error)) from error


async def _without_values(_: Request, error: Exception) -> JSONResponse:
    """Name the fields that one of ms-swift's routes refuses. FastAPI repeats their values, however large."""
    assert isinstance(error, RequestValidationError)
    problems = [f"'{'.'.join(map(str, problem['loc']))}': {problem['msg']}" for problem in error.errors()[:3]]
    return JSONResponse({"detail": "; ".join(problems)}, INVALID)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error(f"a trainer requested a rendezvous but did not connect: {task.exception()}")

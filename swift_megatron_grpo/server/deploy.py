"""`swift rollout` with additional routes for this package's trainer. ms-swift's routes and API key check are unchanged.

One request is one completion, or one conversation with --multi_turn_scheduler; vLLM batches concurrent requests.
Weights have a version. The server generates nothing while new weights arrive, and a failed transfer leaves it without
weights.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from multiprocessing import Pipe, Process
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.utils import get_logger
from torch.distributed import TCPStore

from swift_megatron_grpo import __version__
from swift_megatron_grpo.protocol.channel import Rendezvous, listen
from swift_megatron_grpo.protocol.messages import (
    CONFLICT,
    ENGINE_GONE,
    NO_WEIGHTS,
    PROTOCOL,
    RUN_HEADER,
    TAKEN,
    ConversationSettings,
    Routes,
    ServerStatus,
    serves_another,
)
from swift_megatron_grpo.server.arguments import LOOPBACK, GRPORolloutArguments
from swift_megatron_grpo.server.cancel_on_disconnect import while_connected
from swift_megatron_grpo.server.pipe import CommandError, Commands, EngineGone
from swift_megatron_grpo.server.run_lease import RunLease
from swift_megatron_grpo.server.worker import run_worker

logger = get_logger()
_EVERY_INTERFACE = ("", "0.0.0.0", "::")
Run = Annotated[str | None, Header(alias=RUN_HEADER)]


class GenerateRequest(BaseModel):
    request: dict[str, Any]  # ms-swift's RolloutInferRequest
    sampling: dict[str, Any]  # ms-swift's RequestConfig
    weights_version: int  # that the trainer expects


class JoinRequest(BaseModel):
    host: str  # address at which the trainer reaches this machine
    port: int  # of the rendezvous; 0: any free port
    timeout: float


class ReceiveRequest(BaseModel):
    version: int
    lora: bool  # an adapter on the checkpoint instead of the model's weights
    collect_checksums: bool  # the trainer will request a checksum of each tensor


class ScoreRequest(BaseModel):
    tokens: list[int]
    weights_version: int


class GRPORolloutDeploy(SwiftRolloutDeploy):
    args_class = GRPORolloutArguments
    args: GRPORolloutArguments

    def __init__(self, args: list[str] | GRPORolloutArguments | None = None) -> None:
        self.instance = uuid.uuid4().hex
        self.weights_version = NO_WEIGHTS
        self.lease = RunLease()
        self.description: dict[str, Any] = {}
        self.store: TCPStore | None = None  # of the current group, which exists as long as its store
        self.join_task: asyncio.Task[Any] | None = None
        super().__init__(args)

    # ---- processes

    def _start_data_parallel_workers(self) -> None:
        """Start one process: vLLM's asynchronous engine creates its data-parallel ranks itself."""
        stock_pipe, worker_stock_pipe = Pipe()
        command_pipe, worker_command_pipe = Pipe()
        worker_pipes = (worker_stock_pipe, worker_command_pipe)
        process = Process(target=run_worker, args=(self.args, 0, self.master_port, *worker_pipes))
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C reaches it through this process
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
            watching = asyncio.create_task(self._watch_engine())
            self.description = await self.commands.call("describe")
            yield
            watching.cancel()
            for connection in self.connections:
                connection.send({"type": "shutdown"})

    async def _watch_engine(self) -> None:
        await self.commands.read_results()
        logger.error("the process of the vLLM engine has exited; this server shuts down")
        os.kill(os.getpid(), signal.SIGTERM)

    # ---- routes

    def _register_rl_rollout_app(self) -> None:
        super()._register_rl_rollout_app()
        guard = [Depends(self._require_api_key())]
        self.app.get(Routes.STATUS, dependencies=guard)(self.status)
        self.app.post(Routes.GENERATE, dependencies=guard)(self.generate)
        self.app.post(Routes.JOIN, dependencies=guard)(self.join)
        self.app.post(Routes.RECEIVE, dependencies=guard)(self.receive)
        self.app.post(Routes.SCORE, dependencies=guard)(self.score_text)
        self.app.get(Routes.HELD_WEIGHTS, dependencies=guard)(self.held_weights)
        self.app.post(Routes.LEAVE, dependencies=guard)(self.leave)

    async def status(self, run: Run = None) -> dict[str, Any]:
        """Return the server's status. A run that requests it acquires the lease if no other run holds it."""
        now = time.monotonic()
        if self.lease.touch(run, now):
            self.weights_version = NO_WEIGHTS  # they belong to another run
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
                conversations=self._conversation_settings,
                model=self.description["model"],
            )
        )

    async def generate(self, body: GenerateRequest, client: Request, run: Run = None) -> dict[str, Any]:
        """Generate a completion with the weights that the trainer expects."""
        self._require_weights(run, body.weights_version)
        generating = self._call_engine("generate", request=body.request, sampling=body.sampling)
        completion = await while_connected(client, generating)
        return {**completion, "weights_version": body.weights_version}

    async def score_text(self, body: ScoreRequest, run: Run = None) -> dict[str, Any]:
        """Return the log-probs of every token but the first, from each replica of the model."""
        self._require_weights(run, body.weights_version)
        return await self._call_engine("score_text", tokens=body.tokens)

    async def held_weights(self, run: Run = None) -> dict[str, Any]:
        """Return what each worker has of the weights that it received last."""
        if run is not None:  # a client without a run may read them
            self._require_lease(run)
        return await self._call_engine("held_weights")

    async def leave(self, run: Run = None) -> dict[str, Any]:
        """Release the lease, so that the next run need not wait for it to expire."""
        self.lease.release(run)
        return {}

    def _require_weights(self, run: str | None, version: int) -> None:
        self._require_lease(run)
        if self.weights_version == NO_WEIGHTS or self.weights_version != version:
            raise HTTPException(CONFLICT, f"this server has weights {self.weights_version}, not {version}")

    def _require_lease(self, run: str | None) -> None:
        self._refuse_if_taken(run)
        if not self.lease.is_held_by(run):
            raise HTTPException(CONFLICT, f"this server has no weights of this run; POST {Routes.JOIN} first")

    def _refuse_if_taken(self, run: str | None) -> None:
        holder = self.lease.holder(time.monotonic())
        if holder not in (None, run):
            raise HTTPException(TAKEN, serves_another(holder))

    async def join(self, body: JoinRequest, run: Annotated[str, Header(alias=RUN_HEADER)]) -> dict[str, Any]:
        """Open a rendezvous, to which the trainer connects next. It replaces an earlier one."""
        self._refuse_if_taken(run)
        self.lease.touch(run, time.monotonic())
        self.weights_version = NO_WEIGHTS
        everywhere = self.args.host in _EVERY_INTERFACE
        self.store = listen(self.args.host or "::", body.port)
        rendezvous = Rendezvous(
            host=body.host if everywhere else self.args.host,
            port=self.store.port,
            size=self._world_size + 1,
            session=uuid.uuid4().hex,
            timeout=body.timeout,
        )
        self.join_task = asyncio.create_task(self.commands.call("join", rendezvous=asdict(rendezvous)))
        self.join_task.add_done_callback(_log_failure)
        return asdict(rendezvous) | {"host": body.host}

    async def receive(self, body: ReceiveRequest, run: Run = None) -> dict[str, Any]:
        """Receive the weights that the trainer is sending; respond once all are loaded."""
        self._require_lease(run)
        assert self.join_task is not None  # the trainer joins before it sends
        self.weights_version = NO_WEIGHTS
        await self.join_task
        report: dict[str, Any] = await self._call_engine(
            "receive", lora=body.lora, collect_checksums=body.collect_checksums
        )
        if self.lease.is_held_by(run):
            self.weights_version = body.version
        return report

    async def _call_engine(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = await self.commands.call(command, **arguments)
            return result
        except CommandError as error:
            raise HTTPException(500, str(error)) from error
        except EngineGone as error:
            raise HTTPException(ENGINE_GONE, str(error)) from error

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


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error(f"a trainer requested a rendezvous but did not connect: {task.exception()}")

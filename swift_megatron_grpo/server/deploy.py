"""`swift rollout` with routes for this package's trainer. ms-swift's own stay as they are, and so does its guard.

One request is one completion, or with --multi_turn_scheduler one conversation; vLLM batches what is there. Weights have
a version: from the moment new ones begin to arrive until the last has, nothing is generated, and a transfer that breaks
off leaves the server without weights.
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
from swift_megatron_grpo.server import worker
from swift_megatron_grpo.server.arguments import LOOPBACK, GRPORolloutArguments
from swift_megatron_grpo.server.cancel_on_disconnect import while_connected
from swift_megatron_grpo.server.pipe import CommandError, Commands, EngineGone
from swift_megatron_grpo.server.run_lease import RunLease

logger = get_logger()
_EVERY_INTERFACE = ("", "0.0.0.0", "::")
Run = Annotated[str | None, Header(alias=RUN_HEADER)]


class GenerateRequest(BaseModel):
    request: dict[str, Any]  # ms-swift's RolloutInferRequest
    sampling: dict[str, Any]  # ms-swift's RequestConfig
    weights_version: int  # that the trainer counts on


class JoinRequest(BaseModel):
    host: str  # by which the trainer reaches this machine
    port: int  # of the rendezvous; 0: any
    timeout: float


class ReceiveRequest(BaseModel):
    version: int
    lora: bool  # an adapter on the checkpoint, not the model's weights
    collect_checksums: bool  # the trainer will ask what became of each tensor


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
        self.store: TCPStore | None = None  # of the newest group; it lives as long as this
        self.joining: asyncio.Task[Any] | None = None
        super().__init__(args)

    # ---- processes

    def _start_data_parallel_workers(self) -> None:
        """One process: vLLM's asynchronous engine spreads over data-parallel ranks by itself."""
        stock, its_stock = Pipe()
        ours, its_own = Pipe()
        process = Process(target=worker.main, args=(self.args, 0, self.master_port, its_stock, its_own))
        process.start()
        for end in (its_stock, its_own):  # only the child holds them, so each side notices the other's death
            end.close()
        self.connections.append(stock)
        self.processes.append(process)
        self.commands = Commands(ours)

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
        await self.commands.read_answers()
        logger.error("the process of the vLLM engine has ended; so does this server")
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
        """A run that asks while no other is served has the server from now on."""
        now = time.monotonic()
        if self.lease.touch(run, now):
            self.weights_version = NO_WEIGHTS  # they are another run's
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
                conversations=self._leading,
                model=self.description["model"],
            )
        )

    async def generate(self, asked: GenerateRequest, request: Request, run: Run = None) -> dict[str, Any]:
        self._refuse_other_weights(run, asked.weights_version)
        answering = self._ask_engine("generate", request=asked.request, sampling=asked.sampling)
        answer = await while_connected(request, answering)
        return {**answer, "weights_version": asked.weights_version}

    async def score_text(self, asked: ScoreRequest, run: Run = None) -> dict[str, Any]:
        """Log-probs of every token but the first, by each replica of the model."""
        self._refuse_other_weights(run, asked.weights_version)
        return await self._ask_engine("score_text", tokens=asked.tokens)

    async def held_weights(self, run: Run = None) -> dict[str, Any]:
        """What each worker holds of the weights that it was last sent."""
        if run is not None:  # who has no run may look
            self._refuse_other_runs(run)
        return await self._ask_engine("held_weights")

    async def leave(self, run: Run = None) -> dict[str, Any]:
        """The next run need not wait for this one's silence."""
        self.lease.leave(run)
        return {}

    def _refuse_other_weights(self, run: str | None, version: int) -> None:
        self._refuse_other_runs(run)
        if self.weights_version == NO_WEIGHTS or self.weights_version != version:
            raise HTTPException(CONFLICT, f"this server has weights {self.weights_version} and not {version}")

    def _refuse_other_runs(self, run: str | None) -> None:
        self._refuse_while_taken(run)
        if not self.lease.is_held_by(run):
            raise HTTPException(CONFLICT, f"it has no weights of this run; POST {Routes.JOIN} first")

    def _refuse_while_taken(self, run: str | None) -> None:
        served = self.lease.holder(time.monotonic())
        if served not in (None, run):
            raise HTTPException(TAKEN, serves_another(served))

    async def join(self, asked: JoinRequest, run: Annotated[str, Header(alias=RUN_HEADER)]) -> dict[str, Any]:
        """Opens a rendezvous, to which the trainer comes next. Who joined before is out."""
        self._refuse_while_taken(run)
        self.lease.touch(run, time.monotonic())
        self.weights_version = NO_WEIGHTS
        everywhere = self.args.host in _EVERY_INTERFACE
        self.store = listen(self.args.host or "::", asked.port)
        rendezvous = Rendezvous(
            host=asked.host if everywhere else self.args.host,
            port=self.store.port,
            size=self._world_size + 1,
            session=uuid.uuid4().hex,
            timeout=asked.timeout,
        )
        self.joining = asyncio.create_task(self.commands.call("join", rendezvous=asdict(rendezvous)))
        self.joining.add_done_callback(_log_failure)
        return asdict(rendezvous) | {"host": asked.host}

    async def receive(self, asked: ReceiveRequest, run: Run = None) -> dict[str, Any]:
        """The trainer is sending. Answers when all of it has been loaded."""
        self._refuse_other_runs(run)
        assert self.joining is not None  # or no run would be served
        self.weights_version = NO_WEIGHTS
        await self.joining
        report: dict[str, Any] = await self._ask_engine(
            "receive", lora=asked.lora, collect_checksums=asked.collect_checksums
        )
        if self.lease.is_held_by(run):
            self.weights_version = asked.version
        return report

    async def _ask_engine(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await self.commands.call(command, **arguments)
            return answer
        except CommandError as error:
            raise HTTPException(500, str(error)) from error
        except EngineGone as error:
            raise HTTPException(ENGINE_GONE, str(error)) from error

    @property
    def _leading(self) -> ConversationSettings | None:
        args = self.args
        if not args.multi_turn_scheduler:
            return None
        return ConversationSettings(args.multi_turn_scheduler, args.max_turns, args.gym_env, bool(args.use_gym_env))

    @property
    def _world_size(self) -> int:
        return self.args.vllm_tensor_parallel_size * self.args.vllm_data_parallel_size

    # ---- what is open to whom

    def _warn_if_unauthenticated(self) -> None:
        super()._warn_if_unauthenticated()
        if self.args.host == LOOPBACK:
            logger.info(
                f"The rollout server listens on {LOOPBACK} only. For trainers on other machines: --host and --api_key"
            )


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error(f"a trainer that wanted to join did not come: {task.exception()}")

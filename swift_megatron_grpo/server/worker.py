"""The process that holds the engine. ms-swift's own loop runs in it and serves ms-swift's routes; beside it, ours."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from swift.infer_engine import GRPOVllmEngine
from swift.pipelines.infer import rollout

from swift_megatron_grpo.protocol.messages import packed_logprobs
from swift_megatron_grpo.protocol.model_identity import model_identity
from swift_megatron_grpo.server import pipe
from swift_megatron_grpo.server.arguments import GRPORolloutArguments
from swift_megatron_grpo.server.completions import Completer
from swift_megatron_grpo.server.conversations import Conversations, ConversingEngine
from swift_megatron_grpo.vllm_shared.sampling import scoring_params, text_logprobs

T = TypeVar("T")
_EVERY = 0.5  # seconds between two looks at vLLM's core
WORKER_EXTENSION = "swift_megatron_grpo.server.weight_receiver.WeightReceiver"


def main(
    args: GRPORolloutArguments, data_parallel_rank: int, master_port: int, stock: Connection, ours: Connection
) -> None:
    asyncio.run(_main(args, data_parallel_rank, master_port, stock, ours))


async def _main(
    args: GRPORolloutArguments, data_parallel_rank: int, master_port: int, stock: Connection, ours: Connection
) -> None:
    """Until one of the two loops ends: the web server is gone or wants us gone, or the engine has failed."""
    built: asyncio.Future[tuple[GRPOVllmEngine, Conversations | None]] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        commands = EngineCommands(*await built)
        await asyncio.wait(
            [asyncio.create_task(pipe.serve(ours, commands.commands)), asyncio.create_task(commands.failure())],
            return_when=asyncio.FIRST_COMPLETED,
        )

    _on_engine(built.set_result)
    stock_loop = rollout.async_llm_worker(args, data_parallel_rank, master_port, stock)
    loops = [asyncio.create_task(serve()), asyncio.create_task(stock_loop)]
    await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
    if built.done():
        built.result()[0].engine.shutdown()
    os._exit(0)  # a thread still waits for commands, and would be waited for


def _on_engine(tell: Callable[[tuple[GRPOVllmEngine, Conversations | None]], object]) -> None:
    """ms-swift's loop builds the engine, and its scheduler if there is one; have it build an engine whose workers
    receive our weights, and tell of both."""

    class Engine(ConversingEngine):
        def __init__(self, *args: Any, engine_kwargs: dict[str, Any], **kwargs: Any) -> None:
            engine_kwargs["worker_extension_cls"] = WORKER_EXTENSION
            super().__init__(*args, engine_kwargs=engine_kwargs, **kwargs)

    their_leader = rollout.get_rollout_engine_type

    def leader(args: GRPORolloutArguments, engine: GRPOVllmEngine) -> Any:
        """ms-swift's scheduler, or the engine itself."""
        made = their_leader(args, engine)
        tell((engine, Conversations(made) if args.multi_turn_scheduler else None))
        return made

    rollout.GRPOVllmEngine, rollout.get_rollout_engine_type = Engine, leader


class EngineCommands:
    """What the web server may ask of the engine."""

    def __init__(self, engine: GRPOVllmEngine, conversations: Conversations | None) -> None:
        self._engine = engine
        self._answerer = conversations or Completer(engine)
        self._generating: set[asyncio.Task[Any]] = set()
        each = (self.describe, self.generate, self.join, self.receive, self.score_text, self.held_weights)
        self.commands: dict[str, pipe.Command] = {
            command.__name__: partial(self._unless_engine_failed, command) for command in each
        }

    async def failure(self) -> None:
        """Returns when vLLM's core has failed or was killed, from which it does not recover."""
        while not self._engine.engine.errored:
            await asyncio.sleep(_EVERY)

    async def _unless_engine_failed(self, command: pipe.Command, **arguments: Any) -> Any:
        try:
            return await command(**arguments)
        except Exception:
            if self._engine.engine.errored:  # the answer is that this process ends, not that it could not do this
                await asyncio.Event().wait()
            raise

    async def describe(self) -> dict[str, Any]:
        config = self._engine.engine.vllm_config
        return {
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_logprobs": config.model_config.max_logprobs,
            "model": model_identity(config.model_config.hf_config.to_dict()),
        }

    async def generate(self, request: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        """A completion; or a conversation, where this server leads them."""
        completion = await self._until_new_weights(self._answerer.complete(request, sampling))
        return completion.to_json()

    async def _until_new_weights(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._generating.add(task)
        try:
            return await task
        finally:
            self._generating.discard(task)

    async def join(self, rendezvous: dict[str, Any]) -> None:
        await self._engine.engine.collective_rpc("grpo_join", args=(rendezvous,))

    async def receive(self, lora: bool, collect_checksums: bool) -> dict[str, Any]:
        """What is still being generated is for a trainer that no longer waits for it."""
        left_over = list(self._generating)
        for task in left_over:
            task.cancel()
        await asyncio.gather(*left_over, return_exceptions=True)
        engine = self._engine.engine
        reports = await engine.collective_rpc("grpo_receive", args=(lora, collect_checksums))
        # What older weights computed must not answer for newer ones.
        await engine.reset_prefix_cache()
        await engine.reset_encoder_cache()
        return {"workers": reports}

    async def score_text(self, tokens: list[int]) -> dict[str, Any]:
        """By each data-parallel replica: they hold copies of the weights."""
        replicas = self._engine.engine.vllm_config.parallel_config.data_parallel_size
        told = await asyncio.gather(*(self._score(tokens, replica) for replica in range(replicas)))
        return {"replicas": [packed_logprobs(values) for values in told]}

    async def _score(self, tokens: list[int], replica: int) -> list[float]:
        answers = self._engine.engine.generate(
            {"prompt_token_ids": tokens},
            scoring_params(),
            f"score-{uuid.uuid4().hex}",
            lora_request=await self._engine._get_grpo_lora_request_async(),
            data_parallel_rank=replica,
        )
        [*_, last] = [answer async for answer in answers]
        return text_logprobs(last, tokens)

    async def held_weights(self) -> dict[str, Any]:
        return {"workers": await self._engine.engine.collective_rpc("grpo_held_weights")}

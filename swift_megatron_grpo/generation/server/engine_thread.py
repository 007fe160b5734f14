"""vLLM's engine in a thread of the engine process, with the methods of AsyncLLM that a rollout server calls.

AsyncLLM runs the core in a process of its own, which packs the tokens and log-probs of every request into a message
after every step, and unpacks them here. On an H200 that took 0.9 of 5.2 ms of a step of 128 sequences. In a thread the
core hands objects over, and the event loop is woken only by what a request waits for: mostly its last output.

This needs one device: several are driven by processes, whose failure AsyncLLM detects. A model that takes images keeps
AsyncLLM as well, because the preparation of an image would delay the next step of all other requests.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from setproctitle import setproctitle
from swift.utils import get_logger
from vllm import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.request import RequestStatus

from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.generation.vllm.fast_outputs import speed_up_decoding
from swift_megatron_grpo.generation.vllm.images import held_media
from swift_megatron_grpo.types import Span

T = TypeVar("T")
Command = tuple[Future[Any], Callable[[LLMEngine], Any]]
logger = get_logger()

_SHUTDOWN_SECONDS = 5
# Seconds after which a thread that runs Python lets another one run. Python's default of 5 ms is a step of the engine.
_SWITCH_SECONDS = 5e-4
# Requests of a rollout arrive one by one, within some 60 ms, and whoever misses the first step ends after the others.
# An idle engine waits for the next request for the first of these times, and for all of them no longer than the second.
_GATHERING_SECONDS = 8e-3
_MOST_GATHERING_SECONDS = 0.1


class EngineFailed(RuntimeError):
    """The engine has raised an error in a step, or was shut down; it generates nothing any more."""


class EngineThread:
    """An engine that steps in its own thread while it has requests. All methods are called in one event loop."""

    def __init__(self, config: Any, log_stats: bool, build: Callable[[Any, bool], LLMEngine] | None = None) -> None:
        """Build the engine in its thread. `build`: from the same two arguments."""
        self.vllm_config, self.model_config = config, config.model_config
        self._loop = asyncio.get_running_loop()
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._waiting: dict[str, asyncio.Queue[Any]] = {}  # outputs of a request, by its id
        self.version = NO_WEIGHTS  # of the weights; set here only while nothing is generated
        # The versions that have generated a request, each with the number of tokens before it. By the request's id.
        self._versions: dict[str, list[Span]] = {}
        self._salt: str | None = None  # of the prefix cache, whose older blocks stay when weights arrive in flight
        self._failure: EngineFailed | None = None
        sys.setswitchinterval(_SWITCH_SECONDS)
        setproctitle("VLLM::EngineCore")  # as vLLM names the process of a core
        built: Future[LLMEngine] = Future()
        make = partial(build or build_engine, config, log_stats)
        self._thread = Thread(target=self._run, args=(make, built), name="vLLM engine", daemon=True)
        self._thread.start()
        self.output_processor = built.result().output_processor

    @staticmethod
    def from_engine_args(arguments: AsyncEngineArgs) -> EngineThread | AsyncLLM:
        """Build the engine that this one fits, as AsyncLLM does."""
        context, silent = UsageContext.ENGINE_CONTEXT, arguments.disable_log_stats
        config = arguments.create_engine_config(context)
        parallel = config.parallel_config
        if parallel.world_size * parallel.data_parallel_size == 1 and not held_media(config.model_config):
            return EngineThread(config, log_stats=not silent)
        return AsyncLLM.from_vllm_config(config, usage_context=context, disable_log_stats=silent)

    @property
    def errored(self) -> bool:
        return self._failure is not None

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request. Ending this early aborts the request. The last one has its `spans`."""
        assert data_parallel_rank in (None, 0)
        outputs = self._waiting[request_id] = asyncio.Queue()
        finished = False

        def add(engine: LLMEngine) -> None:
            self._versions[request_id] = [(self.version, 0)]
            salted = prompt if self._salt is None else {**prompt, "cache_salt": self._salt}
            engine.add_request(request_id, salted, sampling_params, lora_request=lora_request)

        try:
            await self._call(add)
            while not finished:
                output = await outputs.get()
                if isinstance(output, EngineFailed):
                    raise output
                finished = output.finished
                if finished:
                    output.spans = split_by_version(self._versions[request_id], len(output.outputs[0].token_ids))
                yield output
        finally:
            del self._waiting[request_id]
            self._versions.pop(request_id, None)
            if not finished:
                self._commands.put((Future(), lambda engine: engine.abort_request([request_id])))

    async def collective_rpc(self, *arguments: Any, **options: Any) -> list[Any]:
        result: list[Any] = await self._call(lambda engine: engine.collective_rpc(*arguments, **options))
        return result

    async def update_in_flight(self, version: int, load: Callable[[LLMEngine], object]) -> None:
        """Load newer weights between two steps. Requests keep their tokens and their cache, and continue with them.

        If `load` fails, nothing is scheduled until `resume`: the weights are neither the old nor the new ones.
        """
        await self._call(partial(self._update, version=version, load=load))

    async def resume(self) -> None:
        await self._call(lambda engine: _scheduler_of(engine).set_pause_state(PauseState.UNPAUSED))

    async def reset_prefix_cache(self) -> Any:
        """Return True if nothing of older weights is in the cache any more."""

        def reset(engine: LLMEngine) -> Any:
            if is_reset := engine.reset_prefix_cache():
                self._salt = None
            return is_reset

        return await self._call(reset)

    async def reset_encoder_cache(self) -> None:
        await self._call(lambda engine: engine.reset_encoder_cache())

    async def reset_mm_cache(self) -> None:
        await self._call(lambda engine: engine.reset_mm_cache())

    async def list_loras(self) -> set[int]:
        return await self._call(lambda engine: engine.list_loras())

    def shutdown(self) -> None:
        """End the thread, unless it is stuck. Requests and commands that are not finished raise EngineFailed."""
        self._commands.put(None)
        self._thread.join(_SHUTDOWN_SECONDS)

    async def _call(self, command: Callable[[LLMEngine], T]) -> T:
        """Run a command in the engine's thread, between two steps."""
        if self._failure is not None:
            raise self._failure
        result: Future[T] = Future()
        self._commands.put((result, command))
        return await asyncio.wrap_future(result)

    # ---- in the engine's thread

    def _run(self, make: Callable[[], LLMEngine], built: Future[LLMEngine]) -> None:
        """Build the engine, whose device and streams belong to this thread, and run it to its end."""
        try:
            engine = make()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(engine)
        try:
            while self._run_commands(engine):
                if _has_work(engine):
                    self._step(engine)
        except BaseException as error:  # also SystemExit, which would end this thread alone and print nothing
            logger.exception("a step of the engine failed")
            self._fail(_failure_of(error))
            while (command := self._commands.get()) is not None:
                self._refuse(*command)
        else:
            self._fail(EngineFailed("the engine was shut down"))
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    self._refuse(*command)
            engine.engine_core.shutdown()

    def _step(self, engine: LLMEngine) -> None:
        if outputs := engine.step():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _update(self, engine: LLMEngine, version: int, load: Callable[[LLMEngine], object]) -> None:
        scheduler, states = _scheduler_of(engine), engine.output_processor.request_states
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        while any(not request.num_output_tokens for request in scheduler.running):
            self._step(engine)  # one version reads a prompt, and its completion begins with that version
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while engine.engine_core.engine_core.batch_queue:  # tokens on the device are of the older weights
            self._step(engine)
        load(engine)
        self.version, self._salt = version, str(version)
        for name, request in scheduler.requests.items():
            state = states.get(name)
            versions = None if state is None else self._versions.get(state.external_req_id)
            if versions is not None:  # it was not aborted in the meantime
                versions.append((version, request.num_output_tokens))
            if request.status is not RequestStatus.RUNNING:  # it reads all of its tokens with the newer weights
                request.cache_salt = self._salt
                request.block_hashes.clear()
                request.update_block_hashes()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _run_commands(self, engine: LLMEngine) -> bool:
        """Run the commands that wait, and wait for one if there is nothing to generate. Return False at the end."""
        first_step = 0.0 if _has_work(engine) else math.inf  # time.monotonic() at which gathering ends
        while True:
            patience = None  # no limit
            if _has_work(engine):
                now = time.monotonic()
                first_step = min(first_step, now + _MOST_GATHERING_SECONDS)
                patience = max(0.0, min(_GATHERING_SECONDS, first_step - now))
            try:
                command = self._commands.get(timeout=patience)
            except Empty:
                return True
            if command is None:
                return False
            _run_command(engine, *command)

    def _fail(self, failure: EngineFailed) -> None:
        """Make all requests raise the failure, and all commands that are sent from now on."""
        self._failure = failure
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._deliver_failure, failure)

    def _refuse(self, result: Future[Any], _: object) -> None:
        if result.set_running_or_notify_cancel():
            result.set_exception(self._failure)

    # ---- in the event loop

    def _deliver(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.request_id in self._waiting:  # otherwise it was aborted in the meantime
                self._waiting[output.request_id].put_nowait(output)

    def _deliver_failure(self, failure: EngineFailed) -> None:
        for outputs in self._waiting.values():
            outputs.put_nowait(failure)


def spans_of(engine: Any, output: Any) -> list[Span] | None:
    """Return the spans of a request from its last output; None: this engine is not updated in flight."""
    spans: list[Span] | None = output.spans if isinstance(engine, EngineThread) else None
    return spans


def split_by_version(versions: Sequence[Span], tokens: int) -> list[Span]:
    """Return the spans of a request. `versions`: those that have generated it, each with the tokens before it."""
    ends = [*(before for _, before in versions[1:]), tokens]
    spans = [(version, end - before) for (version, before), end in zip(versions, ends, strict=True)]
    return [(version, count) for version, count in spans if count]


def _failure_of(error: BaseException) -> EngineFailed:
    return EngineFailed(f"{type(error).__name__}: {error}")


def build_engine(config: Any, log_stats: bool) -> LLMEngine:
    engine = LLMEngine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=log_stats,
        usage_context=UsageContext.ENGINE_CONTEXT,
    )
    speed_up_decoding(engine)
    return engine


def _has_work(engine: LLMEngine) -> bool:
    """Return True as long as vLLM's own loop would step: also for a batch that is on the device when requests end.

    Otherwise the blocks of these requests might not be free when new weights arrive, and the prefix cache would stay.
    """
    core = engine.engine_core.engine_core
    return engine.has_unfinished_requests() or core.scheduler.has_requests() or bool(core.batch_queue)


def _scheduler_of(engine: LLMEngine) -> Any:
    return engine.engine_core.engine_core.scheduler


def _run_command(engine: LLMEngine, result: Future[Any], command: Callable[[LLMEngine], Any]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        value = command(engine)
    except Exception as error:
        result.set_exception(error)
    except BaseException as error:
        result.set_exception(_failure_of(error))
        raise
    else:
        result.set_result(value)

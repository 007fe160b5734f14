"""The engine process: ms-swift's loop serves ms-swift's routes, and a second loop serves this package's commands."""

import asyncio
import base64
import json
import os
import socket
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from swift.infer_engine import GRPOVllmEngine, RequestConfig, vllm_engine
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutInferRequest
from swift.pipelines.infer import rollout
from swift.utils import get_logger
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from swift_megatron_grpo.data.image_formats import placeholder_of
from swift_megatron_grpo.data.images import portable_images
from swift_megatron_grpo.generation.conversations.groups import members
from swift_megatron_grpo.generation.conversations.running import Conversations, NoRoom, current, has_room
from swift_megatron_grpo.generation.protocol.messages import (
    CONFLICT,
    MISSING_IMAGES,
    NO_WEIGHTS,
    Completion,
    InvalidRequest,
    packed_logprobs,
)
from swift_megatron_grpo.generation.protocol.model_identity import model_identity, position_identity, precision_identity
from swift_megatron_grpo.generation.server import engine_thread, health, pipe
from swift_megatron_grpo.generation.server.arguments import GRPORolloutArguments
from swift_megatron_grpo.generation.vllm import cuda_runtime, fast_logprobs, images
from swift_megatron_grpo.generation.vllm.rollout_engine import RolloutEngine
from swift_megatron_grpo.generation.vllm.sampling import (
    read_at_the_end,
    sampling_params,
    scoring_input,
    scoring_params,
    text_logprobs,
    to_completions,
)
from swift_megatron_grpo.runtime.event_loops import run_to_end
from swift_megatron_grpo.types import ScoredText

T = TypeVar("T")
logger = get_logger()
_POLL_SECONDS = 0.5  # between two checks of vLLM's core
_DRAIN_SECONDS, _DRAIN_POLL_SECONDS = 10.0, 0.01  # for batches on the device, of which there are two at most
WORKER_EXTENSION = "swift_megatron_grpo.generation.server.weight_receiver.WeightReceiver"


def run_engine_process(
    args: GRPORolloutArguments, master_port: int, stock_pipe: Connection, command_socket: socket.socket
) -> None:
    """Run the engine process. `stock_pipe` is ms-swift's connection to the web server, the other one pipe.py's."""
    os.setpgrp()  # Ctrl-C would reach vLLM's processes, of which each ends at it by itself
    cuda_runtime.find_runtime_beside_tilelang()
    with asyncio.Runner() as runner:
        run_to_end(runner.get_loop(), _run_worker(args, master_port, stock_pipe, command_socket))


async def _run_worker(
    args: GRPORolloutArguments, master_port: int, stock_pipe: Connection, command_socket: socket.socket
) -> None:
    """Run both loops until one ends: the web server has exited or sent a shutdown, or the engine has failed."""
    built: asyncio.Future[tuple[GRPOVllmEngine, Conversations | None]] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        engine, conversations = await built
        if args.drafts:
            await engine.engine.collective_rpc("grpo_draft")
        commands = EngineCommands(engine, conversations, args.max_media_bytes)
        await _first_to_end(pipe.serve(command_socket, commands.commands), commands.wait_for_engine_failure())

    stock_engine_type = rollout.get_rollout_engine_type

    def get_rollout_engine_type(_: GRPORolloutArguments, engine: GRPOVllmEngine) -> Any:
        """Return what ms-swift returns: its scheduler, or the engine itself."""
        scheduler_or_engine = stock_engine_type(args, engine)
        built.set_result((engine, Conversations(scheduler_or_engine) if args.multi_turn_scheduler else None))
        return scheduler_or_engine

    # the names by which ms-swift's loop builds both
    rollout.GRPOVllmEngine, rollout.get_rollout_engine_type = ServedEngine, get_rollout_engine_type
    await _first_to_end(serve(), rollout.async_llm_worker(args, 0, master_port, stock_pipe))
    if built.done():
        built.result()[0].engine.shutdown()
    os._exit(0)  # a thread still reads ms-swift's commands, and a normal exit would wait for it


async def _first_to_end(*work: Coroutine[Any, Any, object]) -> None:
    await asyncio.wait(list(map(asyncio.create_task, work)), return_when=asyncio.FIRST_COMPLETED)


class ServedEngine(RolloutEngine):
    """ms-swift's engine, which receives this package's weights and records turns of conversations."""

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any], **kwargs: Any) -> None:
        engine_kwargs["worker_extension_cls"] = WORKER_EXTENSION
        super().__init__(*args, engine_kwargs=engine_kwargs, **kwargs)

    def _prepare_engine(self) -> None:
        """Build the engine of this package where ms-swift builds vLLM's asynchronous engine."""
        fast_logprobs.speed_up_logprobs()  # of requests, which are in this process wherever the workers are
        stock, vllm_engine.AsyncLLMEngine = vllm_engine.AsyncLLMEngine, engine_thread.EngineThread
        try:
            super()._prepare_engine()
        finally:
            vllm_engine.AsyncLLMEngine = stock

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **options: Any
    ) -> ChatCompletionResponse:
        turns, infer = current.get(), partial(super().infer_async, infer_request, **options)
        if turns is None:
            return await infer(request_config)
        placeholders = images.placeholder_tokens(self.template)
        return await turns.generate(infer_request, request_config or RequestConfig(), infer, placeholders)

    def _create_chat_completion_response(
        self, result: Any, inputs: dict[str, Any], request_config: RequestConfig, request_id: str
    ) -> ChatCompletionResponse:
        """Remember the spans of a turn, for which ms-swift's responses have no field."""
        if (turns := current.get()) is not None:
            turns.spans = engine_thread.spans_of(self.engine, result)
        return super()._create_chat_completion_response(result, inputs, request_config, request_id)

    def _add_stop_words(self, params: SamplingParams, request_config: RequestConfig) -> None:
        """Report a request once, when it ends, unless it is streamed: ms-swift reads only the last report."""
        super()._add_stop_words(params, request_config)
        if not request_config.stream:
            read_at_the_end(self, params)

    def set_default_max_tokens(self, request_config: RequestConfig, inputs: dict[str, Any]) -> None:
        """Check that there is room for the turn. ms-swift calls this once it has encoded the prompt."""
        length = self._get_num_tokens(inputs)
        if current.get() is not None and not has_room(length, self.max_tokens_offset, self.max_model_len):
            raise NoRoom
        super().set_default_max_tokens(request_config, inputs)


async def reset_prefix_cache(engine: Any) -> None:
    """Reset it, also if a batch is still on the device: its blocks are in use until vLLM has stepped again."""
    end = time.monotonic() + _DRAIN_SECONDS
    while await engine.reset_prefix_cache() is False:
        if time.monotonic() > end:
            raise RuntimeError(
                "vLLM still holds blocks of requests, so values of older weights would stay in its cache"
            )
        await asyncio.sleep(_DRAIN_POLL_SECONDS)


class Completer:
    def __init__(self, engine: GRPOVllmEngine) -> None:
        self._engine = engine
        # Completions of one prompt arrive together and share its encoding while at least one of them needs it.
        self._encodings: WeakValueDictionary[str, asyncio.Future[dict[str, Any]]] = WeakValueDictionary()

    async def complete(self, request: dict[str, Any], sampling: dict[str, Any]) -> Completion:
        """Generate one completion from ms-swift's request and sampling. Cancelling it aborts the request in vLLM."""
        engine = self._engine
        inputs = await self._encoded(request)
        try:  # vLLM validates prompts and parameters before its core receives them
            params = sampling_params(engine, inputs, RequestConfig(**sampling))
            adapter = await engine._get_grpo_lora_request_async()
            generating = engine._add_request(inputs, params, uuid.uuid4().hex, adapter_request=adapter)
            results = [result async for result in generating]
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        [result] = results
        [completion] = to_completions(engine, inputs, result)
        return replace(completion, spans=engine_thread.spans_of(engine.engine, result))

    async def _encoded(self, request: dict[str, Any]) -> dict[str, Any]:
        """Encode the prompt. Templates raise errors of any type for messages that they do not support."""
        # the uuid is not part of the prompt, and other clients give every request its own
        key = json.dumps({name: value for name, value in request.items() if name != "uuid"}, sort_keys=True)
        encoding = self._encodings.get(key)
        if encoding is None:
            template = self._engine.template
            template.set_mode("vllm")
            encoding = asyncio.get_running_loop().run_in_executor(
                None, template.encode, RolloutInferRequest(**request), True
            )
            self._encodings[key] = encoding
        try:
            return await asyncio.shield(encoding)  # other requests may wait for the same encoding
        except Exception as error:
            logger.warning("a prompt cannot be encoded", exc_info=True)
            raise InvalidRequest(
                f"the template cannot encode the prompt ({type(error).__name__}; the server's log has the reason)"
            ) from error


def with_versions(completion: Completion, version: int) -> Completion:
    """Return a completion with its oldest version of the weights, and spans only where there are others.

    `version`: that of all requests of an engine which does not report spans.
    """
    spans = [*(each.spans for each in completion.earlier), completion.spans]
    oldest = min((of_one[0][0] for of_one in spans if of_one), default=version)
    *earlier, last = [
        None if of_one is None or {number for number, _ in of_one} <= {oldest} else of_one for of_one in spans
    ]
    return replace(
        completion,
        weights_version=oldest,
        spans=last,
        earlier=tuple(replace(each, spans=its) for each, its in zip(completion.earlier, earlier, strict=True)),
    )


class MissingImages(InvalidRequest):
    """An image that the request names is not here; the client sends it again."""

    status = MISSING_IMAGES


class NoWeights(InvalidRequest):
    """Newer weights have arrived in part; the client sends them again."""

    status = CONFLICT


class ImageStore:
    """Media that a trainer has sent, by digest, each named by several requests: the last used, up to a size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, str] = OrderedDict()  # base64, as ms-swift's requests take it
        self._bytes = 0

    def put(self, digest: str, image: str) -> None:
        self._bytes += len(image) - len(self._images.pop(digest, ""))
        self._images[digest] = image
        while self._bytes > self._max_bytes and len(self._images) > 1:
            self._bytes -= len(self._images.popitem(last=False)[1])

    def get(self, digests: Sequence[str]) -> list[str]:
        """Return images in order. Raises MissingImages if any was never sent, or has had to make room."""
        missing = [digest for digest in digests if digest not in self._images]
        if missing:
            raise MissingImages(f"{len(missing)} of the images that the request names are not here; send them again")
        for digest in digests:
            self._images.move_to_end(digest)
        return [self._images[digest] for digest in digests]


class EngineCommands:
    """The commands that the web server can send to the engine."""

    def __init__(self, engine: GRPOVllmEngine, conversations: Conversations | None, max_media_bytes: int) -> None:
        self._engine = engine
        self._version = NO_WEIGHTS  # of the weights
        self._is_mixed = False  # weights in flight have failed to arrive, so that some are newer than others
        single = Completer(engine)
        self._single, self._conversations = single, conversations
        self._prober = health.Prober(single.complete, engine.engine)
        self._images = ImageStore(max_media_bytes)
        self._generating: set[asyncio.Task[Any]] = set()
        commands = (
            self.describe, self.probe, self.generate, self.take_draft_counts, self.put_image, self.join, self.receive,
            self.score_text, self.held_weights,
        )  # fmt: skip
        self.commands: dict[str, pipe.Command] = {
            command.__name__: partial(self._unless_engine_failed, command) for command in commands
        }

    async def wait_for_engine_failure(self) -> None:
        """Return once vLLM's core has failed or was killed; it does not recover."""
        while not self._engine.engine.errored:
            await asyncio.sleep(_POLL_SECONDS)

    async def _unless_engine_failed(self, command: pipe.Command, **arguments: Any) -> Any:
        try:
            return await command(**arguments)
        except Exception as error:
            if self._engine.engine.errored:  # report the exit of this process instead of a failed command
                await asyncio.Event().wait()
            if isinstance(error, VLLMValidationError):  # which is a ValueError in some versions of vLLM only
                raise InvalidRequest(error.args[0]) from error  # without the value that its text repeats
            raise

    async def describe(self) -> dict[str, Any]:
        config, model = self._engine.engine.vllm_config, self._engine.engine.vllm_config.model_config
        values = model.hf_config.to_dict()
        return {
            "vocab_size": model.get_vocab_size(),
            "accepts_media": model.is_multimodal_model,
            "status": {  # fields of ServerStatus
                "max_model_len": model.max_model_len,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "max_logprobs": model.max_logprobs,
                "held_media": sorted(images.held_media(model)),
                "images_per_prompt": images.most_per_prompt("image", model),
                "recordings_per_prompt": images.most_per_prompt("audio", model),
                "videos_per_prompt": images.most_per_prompt("video", model),
                "updates_in_flight": isinstance(self._engine.engine, engine_thread.EngineThread),
                "model": model_identity(values) | position_identity(values) | precision_identity(model.dtype),
            },
        }

    async def probe(self) -> dict[str, Any]:
        """Return once the engine has generated a token."""
        await self._cancelled_by_new_weights(self._prober.wait_for_token())
        return {}

    async def generate(
        self,
        request: dict[str, Any],
        sampling: dict[str, Any],
        tokens_of_all_turns: int | None = None,
        image_digests: Sequence[str] = (),
        audio_digests: Sequence[str] = (),
        video_digests: Sequence[str] = (),
        experts: bool = False,
        group: int | None = None,
    ) -> dict[str, Any]:
        """Generate a completion, or a conversation if this server has a scheduler: of a group, all `group` of them."""
        if self._is_mixed:  # the web server does not know it yet
            raise NoWeights("new weights have failed to arrive")
        for kind, digests in (("image", image_digests), ("audio", audio_digests), ("video", video_digests)):
            if digests:
                request = {**request, f"{kind}s": self._images.get([f"{kind} {digest}" for digest in digests])}
        work = self._completions(request, sampling, tokens_of_all_turns, group)
        completions = [with_versions(each, self._version) for each in await self._cancelled_by_new_weights(work)]
        first, *others = [await self._sent(completion, experts) for completion in completions]
        return replace(first, others=tuple(others)).to_json()

    async def _completions(
        self, request: dict[str, Any], sampling: dict[str, Any], tokens_of_all_turns: int | None, group: int | None
    ) -> list[Completion]:
        conversations = self._conversations
        answers = conversations is not None and conversations.answers_groups
        if answers != (group is not None) or (group is not None and tokens_of_all_turns is not None):
            raise InvalidRequest(
                "if the server's scheduler answers all completions of a prompt, a request must have 'group', and no "
                "'tokens_of_all_turns' (--completion_length_limit_scope per_round); otherwise it must have no 'group'"
            )
        if conversations is None:
            return [await self._single.complete(request, sampling)]
        asked, config = RolloutInferRequest(**request), RequestConfig(**sampling)
        if group is not None:
            return await conversations.complete_group(members(asked, group), config)
        return [await conversations.complete(asked, config, tokens_of_all_turns)]

    async def _sent(self, completion: Completion, experts: bool) -> Completion:
        """Return what is sent of a completion: its images as files, and its experts if they were asked for."""
        if "images" in completion.infos and images.most_per_prompt(
            "image", self._engine.engine.vllm_config.model_config
        ):
            shown = await asyncio.to_thread(portable_images, completion.infos["images"])
            completion = replace(completion, infos={**completion.infos, "images": shown})
        return completion if experts else replace(completion, routed_experts=None)

    async def take_draft_counts(self) -> dict[str, Any]:
        [counts, *_] = await self._engine.engine.collective_rpc("grpo_take_draft_counts")  # every worker has the same
        return dict(counts)

    async def put_image(self, kind: str, digest: str, image: str) -> dict[str, Any]:
        self._images.put(f"{kind} {digest}", image)  # a request must not name an image as a recording
        return {}

    async def _cancelled_by_new_weights(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._generating.add(task)
        try:
            return await task
        finally:
            self._generating.discard(task)

    async def join(self, rendezvous: dict[str, Any]) -> None:
        await self._engine.engine.collective_rpc("grpo_join", args=(rendezvous,))

    async def receive(self, version: int, lora: bool, collect_checksums: bool, in_flight: bool) -> dict[str, Any]:
        """Receive and load new weights, after cancelling generation that the trainer no longer waits for.

        `in_flight`: it continues instead, with the new weights. It is cancelled if these do not arrive.
        """
        engine, arguments = self._engine.engine, (lora, collect_checksums)
        if in_flight:
            try:
                await engine.update_in_flight(version, lambda llm: llm.collective_rpc("grpo_receive", args=arguments))
            except Exception:
                self._is_mixed = True
                await self._cancel_generation()
                await engine.resume()
                raise
        else:
            await self._cancel_generation()
            await engine.collective_rpc("grpo_receive", args=arguments)
            # Results cached with older weights must not be used with newer ones.
            await reset_prefix_cache(engine)
            await engine.reset_encoder_cache()
            if isinstance(engine, engine_thread.EngineThread):
                engine.version = version
        self._version, self._is_mixed = version, False
        return {}

    async def _cancel_generation(self) -> None:
        stale = list(self._generating)
        for task in stale:
            task.cancel()
        await asyncio.gather(*stale, return_exceptions=True)

    async def score_text(
        self, tokens: list[int], image: str | None = None, recording: str | None = None, video: str | None = None
    ) -> dict[str, Any]:
        """Compute the text's log-probs on each data-parallel replica, because each has its own copy of the weights."""
        for kind, medium in (("image", image), ("audio", recording), ("video", video)):
            if medium is not None and tokens.count(placeholder_of(kind, self._engine.template.processor)) != 1:
                raise InvalidRequest(f"'tokens' must have one placeholder of the {kind}")
        files = (None if file is None else base64.b64decode(file) for file in (image, recording, video))
        text = ScoredText(tokens, *files)
        replicas = self._engine.engine.vllm_config.parallel_config.data_parallel_size
        logprobs = await asyncio.gather(*(self._score(text, replica) for replica in range(replicas)))
        return {"replicas": [packed_logprobs(values) for values in logprobs]}

    async def _score(self, text: ScoredText, replica: int) -> list[float]:
        results = self._engine.engine.generate(
            scoring_input(text, self._engine.template.processor),
            scoring_params(),
            f"score-{uuid.uuid4().hex}",
            lora_request=await self._engine._get_grpo_lora_request_async(),
            data_parallel_rank=replica,
        )
        [*_, last] = [result async for result in results]
        return text_logprobs(last)

    async def held_weights(self) -> dict[str, Any]:
        return {"workers": await self._engine.engine.collective_rpc("grpo_held_weights")}

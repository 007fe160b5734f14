"""vLLM in the training processes ("colocate"), through ms-swift's engine and its template."""

from collections.abc import Callable, Container, Iterable, Sequence
from copy import copy
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from swift.infer_engine import GRPOVllmEngine
from swift.rlhf_trainers import utils as swift_utils
from swift.template import Template
from swift.utils import get_logger
from vllm import SamplingParams
from vllm.device_allocator import cumem
from vllm.platforms import current_platform

from swift_megatron_grpo.generation.interface import (
    AdapterConfig,
    AnsweredRequest,
    BatchGeneration,
    Generation,
    Request,
    Share,
)
from swift_megatron_grpo.generation.local.engine_settings import further_settings, shared_settings
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.generation.requests import infer_request, request_config, to_rollout
from swift_megatron_grpo.generation.vllm import deepstack, fast_logprobs, fast_outputs, images, position_noise
from swift_megatron_grpo.generation.vllm import sampling as vllm_sampling
from swift_megatron_grpo.generation.vllm.adapter import DiscardedTables, load_adapter, without_adapter
from swift_megatron_grpo.generation.vllm.device_drafts import DeviceDrafts
from swift_megatron_grpo.generation.vllm.drafts import GroupDrafts
from swift_megatron_grpo.generation.vllm.predicted_drafts import METHOD, PredictedDrafts
from swift_megatron_grpo.generation.vllm.rollout_engine import RolloutEngine
from swift_megatron_grpo.generation.vllm.second_runner import Drafts, draft_in_second_runner, drafter_of
from swift_megatron_grpo.runtime.stopping.request import RunStopped, StopRequest
from swift_megatron_grpo.settings.config import SamplingConfig, VllmConfig
from swift_megatron_grpo.types import DraftCounts, Rollout, ScoredText
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.load.prediction_layers import WithPredictionLayers
from swift_megatron_grpo.weights.load.quantization import layers_that_quantize
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights

logger = get_logger()

GIB = 2**30
# An engine on several ranks runs every step on all of them, so they have to leave it together. This costs one small
# reduction over gloo: 0.6 ms between two busy CPU ranks, so 0.04 ms per step.
_STEPS_BETWEEN_QUESTIONS = 16
_STEPS_TO_DRAIN = 8  # vLLM keeps two batches in flight at most
_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # tags of vLLM's allocations
_ASLEEP = frozenset({_WEIGHTS, _KV_CACHE})


class LocalVllm:
    """One engine per `tensor_parallel_size` neighbouring ranks."""

    def __init__(self, config: VllmConfig, template: Template, stop: StopRequest) -> None:
        self._weights_version = NO_WEIGHTS
        size = config.vllm_tensor_parallel_size
        group, place = divmod(dist.get_rank(), size)
        self.share = Share(index=group, of=dist.get_world_size() // size, reports=place == 0)
        self._engine_ranks = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None
        self._give_up = GiveUp(stop, self._engine_ranks)
        self._memory_share = config.vllm_gpu_memory_utilization
        self._sleep_level = config.sleep_level
        if config.sleep_level and not current_platform.is_sleep_mode_available():
            logger.warning(
                f"--sleep_level {config.sleep_level} does nothing on this machine: vLLM's "
                f"{current_platform.device_name} platform has no device memory to release"
            )
            self._sleep_level = 0
        self._asleep = frozenset[str]()
        self._engine = _build(config, template, self._sleep_level > 0, seed=config.seed + group)
        self._name = f"engine {group}"
        self.drafts = _drafts_of(self._engine, self._worker) if config.drafts else None
        model = self._engine.inner_model
        layers = layers_that_quantize(model, self._engine.engine.vllm_config)
        self._model = WithPredictionLayers(model, drafter_of(self._worker).model) if config.predicts_drafts else model
        self._loaded_weights = LoadedWeights(self._model, config.torch_dtype, self._name, layers)
        has_slot = config.lora_rank is not None
        self._tables = DiscardedTables(self._worker) if has_slot and self._sleep_level == 2 else None
        self._base_differs = has_slot and config.base_differs

    @property
    def memory_to_wake(self) -> int:
        if not self._asleep:
            return 0
        pool = [(data.tag, data.handle[1]) for data in cumem.CuMemAllocator.get_instance().pointer_to_data.values()]
        return bytes_to_wake(pool, self._asleep, _share_of_gpu(self._memory_share))

    @property
    def _worker(self) -> Any:
        return self._engine.inner_model_executor.driver_worker.worker

    @property
    def is_new(self) -> bool:
        return self._loaded_weights.is_new

    @property
    def held_media(self) -> frozenset[str]:
        return images.held_media(self._engine.engine.model_config)

    def needs_weights(self, version: int) -> bool:
        return self._weights_version != version

    def mark_verified(self) -> None: ...

    def invalidate_weights(self) -> None:
        self._weights_version = NO_WEIGHTS

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        return BatchGeneration(partial(self._generate, requests, sampling))

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> dict[int, Rollout]:
        rollouts = self._complete(requests, sampling)
        if self.drafts is not None:
            self.drafts.end_generation(self._sampled(rollouts))
        if not self.share.reports:
            return {}
        return {request.index: rollout for request, rollout in zip(requests, rollouts, strict=True)}

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        """Generate on every rank of the engine; only the result of the rank whose share reports is used."""
        return sample(self._engine, requests, sampling, self._weights_version, self._give_up)

    def _sampled(self, rollouts: Sequence[Rollout]) -> int:
        """Return how many tokens vLLM has sampled for these rollouts, which have just been generated."""
        return sum(rollout.length for rollout in rollouts)

    def wake_weights(self) -> None:
        if _WEIGHTS in self._asleep:
            swift_utils.set_expandable_segments(False)
            self._wake(_WEIGHTS)
            deepstack.clear_features(self._engine.inner_model)
            if self._tables is not None:
                self._tables.restore()

    @property
    def lacks_base(self) -> bool:
        return (self._tables is not None or self._base_differs) and self._weights_version == NO_WEIGHTS

    def load_base(self, weights: NamedWeights) -> None:
        with without_adapter(self._engine.inner_model):
            self._load(weights, collect_checksums=self._loaded_weights.is_new)

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
        if adapter is None:
            self._load(weights, collect_checksums)
        else:
            # copies, because vLLM scales them in place, and without a GPU they share memory with the trainer's
            tensors = {name: tensor.detach().clone() for name, tensor in weights}
            load_adapter(self._worker, adapter, tensors)
        # Cached values of older weights must not be used with newer ones.
        self._reset_prefix_cache()
        self._engine.engine.reset_encoder_cache()
        self._weights_version = version

    def _load(self, weights: NamedWeights, collect_checksums: bool) -> None:
        swift_utils.patch_vllm_moe_model_weight_loader(self._engine.inner_model)
        device = torch.device(torch.cuda.current_device())
        finish = partial(
            swift_utils.finish_vllm_weight_reload, self._model, self._engine.engine.model_config, device, strict=True
        )
        self._loaded_weights.load(weights, finish, collect_checksums)

    def wake_cache(self) -> None:
        if _KV_CACHE in self._asleep:
            self._wake(_KV_CACHE)

    def start_scoring(self, text: ScoredText) -> Callable[[], dict[str, list[float]]]:
        return partial(self._score, text)

    def _score(self, text: ScoredText) -> dict[str, list[float]]:
        vllm = self._engine.engine
        adapter = self._engine._get_grpo_lora_request()
        inputs = vllm_sampling.scoring_input(text, self._engine.template.processor)
        vllm.add_request("score_text", inputs, vllm_sampling.scoring_params(), lora_request=adapter)
        output = None
        while vllm.has_unfinished_requests():
            [output] = vllm.step() or [output]
        return {self._name: vllm_sampling.text_logprobs(output)}

    def held_weights(self) -> list[WorkerWeights]:
        return [self._loaded_weights.worker_weights()]

    def _reset_prefix_cache(self) -> None:
        """Reset it, also if a batch is still on the device: its blocks are in use until vLLM has stepped again."""
        engine = self._engine.engine
        for _ in range(_STEPS_TO_DRAIN):
            if engine.reset_prefix_cache() is not False:
                return
            engine.step()
        raise RuntimeError("vLLM still holds blocks of requests that have ended, so values of older weights would stay")

    def _wake(self, tag: str) -> None:
        try:
            self._engine.engine.wake_up(tags=[tag])
        except RuntimeError as error:
            free = torch.cuda.mem_get_info()[0] / GIB
            raise RuntimeError(
                f"vLLM's {tag} did not fit on the GPU, which had {free:.1f} GiB free; "
                "use a lower --vllm_gpu_memory_utilization, or offload more of the trainer while vLLM generates "
                f"with --offload_model, --offload_optimizer and --offload_grad true. vLLM's error: {error}"
            ) from error
        self._asleep -= {tag}

    def sleep(self) -> None:
        if self._sleep_level:
            self._reset_prefix_cache()
            if self._tables is not None and not self._asleep:
                self._tables.save()
            swift_utils.vllm_sleep(self._engine.engine, self._sleep_level)
            swift_utils.set_expandable_segments(True)
            self._asleep = _ASLEEP
            if self._sleep_level == 2:
                self._weights_version = NO_WEIGHTS  # level 2 discards them

    def answered_requests(self) -> list[AnsweredRequest]:
        return []

    def take_draft_counts(self) -> DraftCounts:
        counts = DraftCounts() if self.drafts is None else self.drafts.take_counts()
        return counts if self.share.reports else DraftCounts()  # every rank of an engine has the same

    def shutdown(self) -> None:
        self._engine.engine.engine_core.shutdown()


def keep_memory_cache() -> None:
    """Keep torch's memory cache when vLLM's allocator sleeps or wakes, which would empty it.

    Emptying takes a hundred and more calls that wait for the GPU, and training then allocates the same memory again.
    Residency empties the cache where the memory is needed.
    """
    vars(cumem)["torch"] = _WithoutEmptyCache(torch)


class _WithoutEmptyCache:
    """A module of torch as vLLM's allocator sees it, and nothing else in this process."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "empty_cache":
            return lambda: None
        value = getattr(self._module, name)
        return _WithoutEmptyCache(value) if name in ("cuda", "accelerator") else value


def bytes_to_wake(pool: Sequence[tuple[str, int]], asleep: Container[str], share: int) -> int:
    """Return what sleeps of vLLM's pool, tags and bytes of its allocations, plus activations.

    Activations get what --vllm_gpu_memory_utilization, a share of so many bytes, leaves: at least 1 GiB, and at most 4
    GiB because --vllm_engine_kwargs may set the size of the cache independently. Whatever is not the KV cache wakes
    with the weights.
    """
    total = sum(size for _, size in pool)
    sleeping = total if _WEIGHTS in asleep else sum(size for tag, size in pool if tag == _KV_CACHE)
    return sleeping + min(max(share - total, GIB), 4 * GIB)


def memory_to_start(config: VllmConfig) -> int:
    """Return the bytes that must be free on the GPU for vLLM to start."""
    return 0 if current_platform.is_cpu() else _share_of_gpu(config.vllm_gpu_memory_utilization)


def _share_of_gpu(share: float) -> int:
    return int(torch.cuda.mem_get_info()[1] * share)


def _build(config: VllmConfig, template: Template, sleep_mode: bool, seed: int) -> GRPOVllmEngine:
    fast_logprobs.speed_up_logprobs()
    position_noise.sample_by_position()
    deepstack.skip_features_of_missing_tower()
    draft_in_second_runner()
    keep_memory_cache()
    template = copy(template)
    template.padding_free = False
    template.sequence_parallel_size = 1
    swift_utils.set_expandable_segments(False)  # vLLM's memory pool for sleeping cannot live in expandable segments
    engine_kwargs = {**config.vllm_engine_kwargs, **further_settings(config)}
    engine = RolloutEngine(
        config.model_dir, torch_dtype=config.torch_dtype, model_type=config.model_type, use_async_engine=False,
        seed=seed, enable_sleep_mode=sleep_mode, load_format=engine_kwargs.pop("load_format", "auto"),
        template=template, engine_kwargs=engine_kwargs, **shared_settings(config),
    )  # fmt: skip
    swift_utils.set_expandable_segments(True)
    fast_outputs.speed_up_decoding(engine.engine)
    return engine


def _drafts_of(engine: GRPOVllmEngine, worker: Any) -> Drafts:
    """Return what drafts for this engine; it takes part in the steps of this rank's worker."""
    if engine.engine.vllm_config.speculative_config.method == METHOD:
        return PredictedDrafts(engine.engine.engine_core.engine_core.scheduler)
    drafts: GroupDrafts | DeviceDrafts = drafter_of(worker)
    drafts.follow(worker.model_runner)
    return drafts


# ---- completions: ms-swift encodes prompts, and vLLM returns only what is used


class GiveUp:
    """Gives up a generation when the run stops, on all ranks of an engine after the same step of vLLM."""

    def __init__(self, stop: StopRequest, engine_ranks: dist.ProcessGroup | None) -> None:
        """`engine_ranks`: the ranks of the engine, over gloo; None for an engine on one rank."""
        self._stop, self._engine_ranks = stop, engine_ranks
        self._steps = 0

    def check(self) -> None:
        """Raise RunStopped if the run stops and its time for the current step is over."""
        self._steps += 1
        over = self._stop.out_of_time()
        if self._engine_ranks is not None:
            if self._steps % _STEPS_BETWEEN_QUESTIONS:
                return
            on_ranks = torch.tensor([int(over)])
            dist.all_reduce(on_ranks, op=dist.ReduceOp.MAX, group=self._engine_ranks)
            over = bool(on_ranks.item())
        if over:
            raise self._stop.give_up("generation")


def sample(
    engine: GRPOVllmEngine, requests: Sequence[Request], sampling: SamplingConfig, weights_version: int, give_up: GiveUp
) -> list[Rollout]:
    """Generate one completion for each request, in order."""
    distinct = {request.prompt.prompt_id: request.prompt for request in requests}  # each is encoded once
    engine.template.set_mode("vllm")
    encoded, _ = engine._batch_encode([infer_request(prompt) for prompt in distinct.values()], strict=True)
    of_prompt = dict(zip(distinct, encoded, strict=True))
    batches = _batches(requests, is_greedy=sampling.temperature == 0)
    inputs = [of_prompt[batch[0].prompt.prompt_id] for batch in batches]
    params = (_params(engine, prompt, batch, sampling) for prompt, batch in zip(inputs, batches, strict=True))
    outputs = run_batch(engine, zip(inputs, params, strict=True), give_up)
    return [
        to_rollout(request, completion, weights_version)
        for batch, prompt, output in zip(batches, inputs, outputs, strict=True)
        for request, completion in zip(batch, vllm_sampling.to_completions(engine, prompt, output), strict=True)
    ]


def _batches(requests: Sequence[Request], is_greedy: bool) -> list[list[Request]]:
    """Return neighbours of one prompt together, which vLLM validates once; seeds count up, greedy ones stay alone."""

    def shared(at: tuple[int, Request]) -> tuple[object, ...]:
        place, request = at
        return request.prompt.prompt_id, request.seed and request.seed - place, is_greedy and place

    return [[request for _, request in batch] for _, batch in groupby(enumerate(requests), shared)]


def _params(
    engine: GRPOVllmEngine, inputs: dict[str, Any], batch: Sequence[Request], sampling: SamplingConfig
) -> SamplingParams:
    prompt, seed = batch[0].prompt, batch[0].seed
    try:
        params = vllm_sampling.sampling_params(engine, inputs, request_config(sampling, seed))
    except ValueError as error:
        begin = str(prompt.row["messages"])[:200]
        raise ValueError(f"prompt {prompt.prompt_id}: {error}. It begins: {begin}") from error
    params.n = len(batch)
    return params


def run_batch(
    engine: GRPOVllmEngine, requests: Iterable[tuple[dict[str, Any], SamplingParams]], give_up: GiveUp
) -> list[Any]:
    """Run encoded prompts as one batch. Return vLLM's outputs in order, or raise RunStopped if the run stops."""
    adapter = engine._get_grpo_lora_request()
    ids = []
    for number, (inputs, params) in enumerate(requests):
        ids.append(str(number))
        engine._add_request(inputs, params, ids[-1], adapter_request=adapter)
    finished: dict[str, Any] = {}
    while engine.engine.has_unfinished_requests():
        finished.update((output.request_id, output) for output in engine.engine.step())
        try:
            give_up.check()
        except RunStopped:
            engine.engine.abort_request([request_id for request_id in ids if request_id not in finished])
            raise
    return [finished[request_id] for request_id in ids]

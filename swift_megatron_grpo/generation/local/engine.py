"""vLLM in the training processes ("colocate"), through ms-swift's engine and its template."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from swift.infer_engine import GRPOVllmEngine
from swift.rlhf_trainers.utils import (
    finish_vllm_weight_reload,
    patch_vllm_moe_model_weight_loader,
    set_expandable_segments,
    vllm_sleep,
)
from swift.template import Template
from swift.utils import get_logger
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
from swift_megatron_grpo.generation.local.sampling import GiveUp, sample
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.generation.vllm.adapter import load_adapter
from swift_megatron_grpo.generation.vllm.fast_logprobs import speed_up_logprobs
from swift_megatron_grpo.generation.vllm.fast_outputs import speed_up_decoding
from swift_megatron_grpo.generation.vllm.images import EngineForImages, has_vision_tower
from swift_megatron_grpo.generation.vllm.sampling import scoring_input, scoring_params, text_logprobs
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import SamplingConfig, VllmConfig
from swift_megatron_grpo.types import Rollout, ScoredText
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.load.quantization import layers_that_quantize
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights

logger = get_logger()

GIB = 2**30
_STEPS_TO_DRAIN = 8  # vLLM keeps two batches in flight at most
_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # tags of vLLM's allocations
_ASLEEP = frozenset({_WEIGHTS, _KV_CACHE})


class LocalVllm:
    """One engine per `tensor_parallel_size` neighbouring ranks."""

    def __init__(self, config: VllmConfig, template: Template, stop: StopRequest) -> None:
        self._weights_version = NO_WEIGHTS
        rank, world_size = dist.get_rank(), dist.get_world_size()
        group, place = divmod(rank, config.tensor_parallel_size)
        self._share = Share(index=group, of=world_size // config.tensor_parallel_size, reports=place == 0)
        size = config.tensor_parallel_size
        self._engine_ranks = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None
        self._give_up = GiveUp(stop, self._engine_ranks)
        self._memory_share = config.gpu_memory_utilization
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
        model = self._engine.inner_model
        layers = layers_that_quantize(model, self._engine.engine.vllm_config)
        self._loaded_weights = LoadedWeights(model, config.dtype, self._name, layers)

    @property
    def share(self) -> Share:
        return self._share

    @property
    def memory_to_wake(self) -> int:
        if not self._asleep:
            return 0
        pool = [(data.tag, data.handle[1]) for data in cumem.CuMemAllocator.get_instance().pointer_to_data.values()]
        return bytes_to_wake(pool, self._asleep, _share_of_gpu(self._memory_share))

    @property
    def is_new(self) -> bool:
        return self._loaded_weights.is_new

    @property
    def has_vision_tower(self) -> bool:
        return has_vision_tower(self._engine.engine.model_config)

    def needs_weights(self, version: int) -> bool:
        return self._weights_version != version

    def mark_verified(self) -> None: ...

    def invalidate_weights(self) -> None:
        self._weights_version = NO_WEIGHTS

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        return BatchGeneration(partial(self._generate, requests, sampling))

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> dict[int, Rollout]:
        rollouts = self._complete(requests, sampling)
        if not self.share.reports:
            return {}
        return {request.index: rollout for request, rollout in zip(requests, rollouts, strict=True)}

    def _complete(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Rollout]:
        """Generate on every rank of the engine; only the result of the rank whose share reports is used."""
        return sample(self._engine, requests, sampling, self._weights_version, self._give_up)

    def wake_weights(self) -> None:
        if _WEIGHTS in self._asleep:
            set_expandable_segments(False)
            self._wake(_WEIGHTS)

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
        if adapter is None:
            model = self._engine.inner_model
            patch_vllm_moe_model_weight_loader(model)
            device = torch.device(torch.cuda.current_device())
            finish = partial(finish_vllm_weight_reload, model, self._engine.engine.model_config, device, strict=True)
            self._loaded_weights.load(weights, finish, collect_checksums)
        else:
            # copies, because vLLM scales them in place, and without a GPU they share memory with the trainer's
            tensors = {name: tensor.detach().clone() for name, tensor in weights}
            load_adapter(self._engine.inner_model_executor.driver_worker.worker, adapter, tensors)
        # Cached values of older weights must not be used with newer ones.
        self._reset_prefix_cache()
        self._engine.engine.reset_encoder_cache()
        self._weights_version = version

    def wake_cache(self) -> None:
        if _KV_CACHE in self._asleep:
            self._wake(_KV_CACHE)

    def start_scoring(self, text: ScoredText) -> Callable[[], dict[str, list[float]]]:
        return partial(self._score, text)

    def _score(self, text: ScoredText) -> dict[str, list[float]]:
        vllm = self._engine.engine
        adapter = self._engine._get_grpo_lora_request()
        vllm.add_request("score_text", scoring_input(text), scoring_params(), lora_request=adapter)
        output = None
        while vllm.has_unfinished_requests():
            [output] = vllm.step() or [output]
        return {self._name: text_logprobs(output)}

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
            vllm_sleep(self._engine.engine, self._sleep_level)
            set_expandable_segments(True)
            self._asleep = _ASLEEP
            if self._sleep_level == 2:
                self._weights_version = NO_WEIGHTS  # level 2 discards them

    def answered_requests(self) -> list[AnsweredRequest]:
        return []

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
            return _do_nothing
        value = getattr(self._module, name)
        return _WithoutEmptyCache(value) if name in ("cuda", "accelerator") else value


def _do_nothing() -> None: ...


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
    return 0 if current_platform.is_cpu() else _share_of_gpu(config.gpu_memory_utilization)


def _share_of_gpu(share: float) -> int:
    return int(torch.cuda.mem_get_info()[1] * share)


def _build(config: VllmConfig, template: Template, sleep_mode: bool, seed: int) -> GRPOVllmEngine:
    speed_up_logprobs()
    keep_memory_cache()
    template = copy(template)
    template.padding_free = False
    template.sequence_parallel_size = 1
    set_expandable_segments(False)  # vLLM's memory pool for sleeping cannot live in expandable segments
    engine_kwargs = {**config.engine_kwargs, **further_settings(config)}
    engine = EngineForImages(
        config.model_dir,
        torch_dtype=config.dtype,
        model_type=config.model_type,
        use_async_engine=False,
        seed=seed,
        enable_sleep_mode=sleep_mode,
        load_format=engine_kwargs.pop("load_format", "auto"),
        template=template,
        engine_kwargs=engine_kwargs,
        **shared_settings(config),
    )
    set_expandable_segments(True)
    speed_up_decoding(engine.engine)
    return engine

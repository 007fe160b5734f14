"""Fixes of upstream code that fails without a GPU, applied to a module right after it is imported.

Installed by `activate()`. One function per fault. The fixes do not change what upstream computes, only that it can be
computed on a CPU.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from swift_megatron_grpo.platforms.cpu.linear_attention.vllm_core import compute_in_torch
from swift_megatron_grpo.platforms.cpu.routed_experts import allow_first_runner, capture_in_first_runner
from swift_megatron_grpo.runtime.replaced import wrap

_MAX_SENDS_IN_FLIGHT = 64
_SHARED_MEMORY = Path("/dev/shm")


def accept_cpu_tensor_types(module: ModuleType) -> None:
    """Make Megatron's optimizers accept CPU parameters: they check `param.type() == "torch.cuda.FloatTensor"`.

    The literals are replaced in the code of the functions, because changing Tensor.type() would affect all libraries.
    """
    for function in _functions_of(module):
        function.__code__ = _without_cuda_literals(function.__code__)


def _functions_of(module: ModuleType) -> list[FunctionType]:
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    values = [value for namespace in (module, *classes) for value in vars(namespace).values()]
    values = [value.__func__ if isinstance(value, (staticmethod, classmethod)) else value for value in values]
    values = [value.fget if isinstance(value, property) else value for value in values]
    return [value for value in values if isinstance(value, FunctionType) and value.__module__ == module.__name__]


def _without_cuda_literals(constant: Any) -> Any:
    """Return a constant of a code object, including nested functions, without "torch.cuda." in tensor types."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(map(_without_cuda_literals, constant.co_consts)))
    if isinstance(constant, tuple):
        return tuple(map(_without_cuda_literals, constant))
    if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
        return constant.replace("torch.cuda.", "torch.", 1)
    return constant


def convert_split_sizes_to_numpy(token_dispatcher: Any) -> None:
    """Convert split sizes to numpy, as Megatron does on a GPU: all_to_all_single rejects tensors."""

    @wrap(token_dispatcher, "maybe_move_tensor_to_cpu")
    def move_or_convert(move: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)


def copy_sent_tensors(p2p_communication: Any) -> None:
    """Send copies, and keep each copy and its handle until the send has completed.

    The interleaved pipeline reuses the storage of a tensor that it has sent, and drops some of the handles. With NCCL
    the stream orders this. gloo reads the memory later and keeps a reference to neither.
    """
    in_flight: list[_Send] = []

    @wrap(p2p_communication, "_p2p_ops")
    def p2p_ops_with_copies(p2p_ops: Any, **kwargs: Any) -> dict[str, Any]:
        sent = {name: kwargs[f"tensor_{name}"] for name in ("send_prev", "send_next")}
        copies = {name: tensor.detach().clone() for name, tensor in sent.items() if tensor is not None}
        requests: dict[str, Any] = p2p_ops(**{**kwargs, **{f"tensor_{name}": copy for name, copy in copies.items()}})
        requests |= {name: _Send(requests[name], copy) for name, copy in copies.items()}
        in_flight[:] = [send for send in in_flight if not send.is_completed()]
        in_flight.extend(requests[name] for name in copies)
        while len(in_flight) > _MAX_SENDS_IN_FLIGHT:  # sends whose handles the pipeline has dropped
            in_flight.pop(0).wait()
        return requests


class _Send:
    """A send and its tensor. gloo detects that a send has completed only in wait(), which can be called only once."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        if not self._work.is_completed():
            self._work.wait()


def silence_rng_warning(random: ModuleType) -> None:
    """Suppress a warning at every fork of Megatron's tracker: here the CPU's generator is the one that is forked."""
    message = "CPU RNG state changed within GPU RNG context"
    logging.getLogger(random.__name__).addFilter(lambda record: record.getMessage() != message)


def use_sdpa_in_vision_towers(model_config: Any) -> None:
    """Make SDPA the default attention of mcore-bridge's vision towers, in place of flash_attention_2."""

    @wrap(model_config.ModelConfig, "__post_init__")
    def set_and_post_init(post_init: Any, self: Any) -> None:
        if self.vit_attn_impl is None:
            self.vit_attn_impl = "sdpa"
        post_init(self)


def force_accelerate_cpu_state(state: Any) -> None:
    """Build accelerate's PartialState with cpu=True; otherwise accelerate.utils.gather silently returns its argument.

    It is built on first use and not here, because on several ranks building it is a rendezvous.
    """
    partial_state = state.PartialState

    @wrap(partial_state, "__init__")
    def build_on_cpu(build: Any, self: Any, cpu: bool = True, **kwargs: Any) -> None:
        build(self, cpu=True, **kwargs)

    launched_by_torchrun = "LOCAL_RANK" in os.environ
    if launched_by_torchrun and partial_state._shared_state and not partial_state._shared_state["_cpu"]:
        partial_state._reset_state()


def skip_destroyed_groups(parallel_state: Any) -> None:
    """Skip the destruction of vLLM's groups at exit if ms-swift has already destroyed all process groups."""

    @wrap(parallel_state.GroupCoordinator, "destroy")
    def destroy_if_initialized(destroy: Any, self: Any) -> None:
        if dist.is_initialized():
            destroy(self)


def name_after_the_first_rank(cpu_communicator: Any) -> None:
    """Name the memory that vLLM's tensor-parallel ranks share after the process of the group's first rank.

    vLLM names it after the port of an engine's processes, which the ranks of a torchrun do not have. So two runs at a
    time had one name, and the memory of a killed run kept every later one from starting ("create shm in SHMManager
    failed"). The memory of processes that ended is removed.
    """
    owner = cpu_communicator._CPUSHMDistributed
    make_group_name = owner.make_group_name

    def make_own_name(communicator: Any) -> str:
        first = torch.tensor(os.getpid())
        dist.broadcast(first, src=communicator.ranks[0], group=communicator.device_group)
        remove_memory_of_ended_processes(_SHARED_MEMORY)
        return f"{first.item()}{make_group_name(communicator).lstrip('/')}"  # it begins with slashes: env://

    owner.make_group_name = staticmethod(make_own_name)


def remove_memory_of_ended_processes(folder: Path) -> None:
    for memory in folder.glob("*-tp:*-cpushm_*"):
        process = memory.name.partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            memory.unlink(missing_ok=True)


def keep_unpacked_weights(utils: Any) -> None:
    """Keep the weights of linear layers and convolutions: vLLM packs them for its CPU kernels, and none can be loaded.

    A weight with three dimensions is that of a convolution, which it packs in place, or of experts, which
    `pack_reloaded_experts` handles.
    """

    @wrap(utils, "dispatch_cpu_unquantized_gemm")
    def multiply_unpacked(dispatch: Any, layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta:
            dispatch(layer, remove_weight)
        elif layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear


def pack_reloaded_experts(method: Any) -> None:
    """Pack experts again after a reload: vLLM packs on the first load only, and its kernel reads packed ones."""

    @wrap(method.UnquantizedFusedMoEMethod, "_setup_kernel")
    def setup_and_pack(setup: Any, self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloaded = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if reloaded:
            _pack_experts(self.moe_kernel.fused_experts, layer)


def _pack_experts(experts: Any, layer: Any) -> None:
    """Pack as on the first load, but in place, after zeroing the padding, which contains packed values."""
    if experts._use_zentorch:  # uses unpacked experts
        return
    pack = vars(sys.modules[type(experts).__module__])["cpu_prepack_moe_weight"]
    used = experts.moe_config.intermediate_size_per_partition
    padded = layer.w2_weight.shape[2]
    layer.w13_weight.data[:, used:padded] = 0
    layer.w13_weight.data[:, padded + used :] = 0
    layer.w2_weight.data[:, :, used:] = 0
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data.copy_(pack(weight.data, experts.isa))


def compute_local_experts(cpu_moe: Any) -> None:
    """Give vLLM's CPU kernel the ids of the experts that this worker holds, with expert parallelism.

    It takes ids of the whole layer for its own, and reads beyond its weights. Experts of other workers count 0 here;
    the workers' results are summed afterwards.
    """
    if not hasattr(cpu_moe, "CPUUnquantizedExperts"):  # vLLM 0.25.1, which has no such kernel
        return

    @wrap(cpu_moe.CPUUnquantizedExperts, "apply")
    def apply_local(
        apply: Any,
        self: Any,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,  # [experts] place on this worker; -1: on another one
        **others: Any,
    ) -> None:
        if expert_map is not None:
            if others["apply_router_weight_on_input"]:
                raise NotImplementedError("expert parallelism with weights on the input of experts, on a CPU")
            places = expert_map[topk_ids.long()]
            topk_weights, topk_ids = topk_weights.masked_fill(places < 0, 0), places.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)


def reset_generators_of_partial_prefills(gpu_model_runner: Any) -> None:
    """Reset the generator of a seeded request whose prompt has been processed only in part.

    Such a request has drawn one random number too many. vLLM moves its generator back by an offset, which a CPU
    generator does not support. The request has not generated any token yet, so that its initial state is correct.
    """

    @wrap(gpu_model_runner.GPUModelRunner, "_bookkeeping_sync")
    def reset_and_bookkeep(bookkeep: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        partial = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        reset = {index: generators.pop(index) for index in partial if index in generators}
        for generator in reset.values():
            generator.manual_seed(generator.initial_seed())
        result = bookkeep(self, *args, **kwargs)
        generators.update(reset)
        return result


def fix_first_runner(gpu_model_runner: Any) -> None:
    reset_generators_of_partial_prefills(gpu_model_runner)
    capture_in_first_runner(gpu_model_runner)


def expand_by_request(rejection_sampler: Any) -> None:
    """Give rows of drafts the temperature, top-k and top-p of their requests.

    vLLM 0.32's CPU kernel writes all but int64 to a copy and drops it, so they had what was in memory before.
    """

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        return torch.repeat_interleave(x.masked_fill(x == replace_from, replace_to), counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def prefer_the_given_cache_size(cpu: Any) -> None:
    """Make vLLM use `kv_cache_memory_bytes` where it is given, not VLLM_CPU_KVCACHE_SPACE, which is our default."""
    check_and_update = cpu.CpuPlatform.check_and_update_config

    @functools.wraps(check_and_update.__func__)
    def check_and_update_config(_cls: type, vllm_config: Any) -> None:
        given = vllm_config.cache_config.kv_cache_memory_bytes
        check_and_update(vllm_config)
        if given is not None:
            vllm_config.cache_config.kv_cache_memory_bytes = given

    cpu.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def select_optimizer_states_for_the_cpu(hybrid_optimizer: Any) -> None:
    """Let Megatron's optimizer with states on the CPU copy its share of the parameters, though all are on the CPU."""

    @wrap(hybrid_optimizer.HybridDeviceOptimizer, "_get_sub_optimizer_param_groups")
    def select_on_one_device(select: Any, self: Any, offload_fraction: float) -> Any:
        with _TensorsOnDevice():
            return select(self, offload_fraction)


class _TensorsOnDevice(TorchFunctionMode):
    """A mode in which every tensor is on a GPU, except results of Tensor.cpu() and what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self._on_cpu: dict[int, torch.Tensor] = {}  # kept alive, because ids are used again

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from_cpu = bool(args) and id(args[0]) in self._on_cpu
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not from_cpu
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and (from_cpu or func is torch.Tensor.cpu):
            self._on_cpu[id(result)] = result
        return result


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.state": force_accelerate_cpu_state,
    "mcore_bridge.config.model_config": use_sdpa_in_vision_towers,
    "megatron.core.jit": lambda jit: jit.disable_jit_fuser(),  # it would compile C++ for minutes to save milliseconds
    "megatron.core.optimizer.clip_grads": accept_cpu_tensor_types,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": select_optimizer_states_for_the_cpu,
    "megatron.core.optimizer.distrib_optimizer": accept_cpu_tensor_types,
    "megatron.core.optimizer.optimizer": accept_cpu_tensor_types,
    "megatron.core.pipeline_parallel.p2p_communication": copy_sent_tensors,
    "megatron.core.tensor_parallel.random": silence_rng_warning,
    "megatron.core.transformer.moe.token_dispatcher": convert_split_sizes_to_numpy,
    "vllm.config.vllm": allow_first_runner,
    "vllm.distributed.device_communicators.cpu_communicator": name_after_the_first_rank,
    "vllm.distributed.parallel_state": skip_destroyed_groups,
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": compute_local_experts,
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": pack_reloaded_experts,
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention": compute_in_torch,
    "vllm.model_executor.layers.utils": keep_unpacked_weights,
    "vllm.platforms.cpu": prefer_the_given_cache_size,
    "vllm.v1.sample.rejection_sampler": expand_by_request,
    "vllm.v1.worker.gpu_model_runner": fix_first_runner,
}

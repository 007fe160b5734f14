"""What upstream gets wrong without a GPU, put right in the module that has it, right after that module is imported.

For `activate()`. One function per fault. Nothing here changes what upstream computes; it makes it compute that on a
CPU.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

_MAX_SENDS_IN_FLIGHT = 64


def do_not_fuse(jit: Any) -> None:
    """megatron.core.jit decorates its fused functions with torch.compile: minutes of C++ for milliseconds of work."""
    jit.disable_jit_fuser()


def accept_cpu_tensor_types(module: ModuleType) -> None:
    """Megatron's optimizers recognise parameters by `param.type() == "torch.cuda.FloatTensor"`.

    The literals are replaced where they are compared: making Tensor.type() lie would reach every other library.
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
    """The same constant of a code object, nested functions included, with "torch.cuda." taken out of tensor types."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(map(_without_cuda_literals, constant.co_consts)))
    if isinstance(constant, tuple):
        return tuple(map(_without_cuda_literals, constant))
    if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
        return constant.replace("torch.cuda.", "torch.", 1)
    return constant


def make_split_sizes_arrays(token_dispatcher: Any) -> None:
    """`maybe_move_tensor_to_cpu(sizes, as_numpy=True)` leaves CPU tensors tensors, which all_to_all_single refuses."""
    move = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def move_or_convert(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_or_convert


def keep_sent_tensors(p2p_communication: Any) -> None:
    """The interleaved pipeline gives away the storage of a tensor that it has sent, and some of the handles.

    With NCCL the stream orders that. gloo reads the memory later, and holds neither: so send copies, and keep each copy
    and its handle until the send is over.
    """
    p2p_ops = p2p_communication._p2p_ops
    in_flight: list[_Send] = []

    @functools.wraps(p2p_ops)
    def p2p_ops_with_copies(**kwargs: Any) -> dict[str, Any]:
        sent = {name: kwargs[f"tensor_{name}"] for name in ("send_prev", "send_next")}
        copies = {name: tensor.detach().clone() for name, tensor in sent.items() if tensor is not None}
        requests = p2p_ops(**{**kwargs, **{f"tensor_{name}": copy for name, copy in copies.items()}})
        requests |= {name: _Send(requests[name], copy) for name, copy in copies.items()}
        in_flight[:] = [send for send in in_flight if not send.is_completed()]
        in_flight.extend(requests[name] for name in copies)
        while len(in_flight) > _MAX_SENDS_IN_FLIGHT:  # of those whose handles were given away
            in_flight.pop(0).wait()
        return requests

    p2p_communication._p2p_ops = p2p_ops_with_copies


class _Send:
    """A handle and what it sends. gloo knows that a send is over only once it was waited for, and waits only once."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        if not self._work.is_completed():
            self._work.wait()


def expect_one_generator(random: ModuleType) -> None:
    """At every fork of its tracker Megatron warns if the CPU's generator moved: here that is the one it forked."""
    message = "CPU RNG state changed within GPU RNG context"
    logging.getLogger(random.__name__).addFilter(lambda record: record.getMessage() != message)


def prefer_sdpa_for_images(model_config: Any) -> None:
    """mcore-bridge's vision towers take flash_attention_2 unless told otherwise."""
    _before(model_config.ModelConfig, "__post_init__", _set_vision_attention)


def _set_vision_attention(config: Any) -> None:
    if config.vit_attn_impl is None:
        config.vit_attn_impl = "sdpa"


def gather_on_cpu(state: Any) -> None:
    """accelerate.utils.gather returns its argument, silently, unless the first PartialState was built with cpu=True.

    Built when somebody first asks for it and not now: on several ranks building it is a rendezvous.
    """
    partial_state = state.PartialState
    build = partial_state.__init__

    @functools.wraps(build)
    def build_on_cpu(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        build(self, cpu=True, **kwargs)

    partial_state.__init__ = build_on_cpu
    launched_by_torchrun = "LOCAL_RANK" in os.environ
    if launched_by_torchrun and partial_state._shared_state and not partial_state._shared_state["_cpu"]:
        partial_state._reset_state()


def leave_destroyed_groups_alone(parallel_state: Any) -> None:
    """vLLM takes its groups down when the interpreter exits; by then ms-swift has destroyed every process group."""
    destroy = parallel_state.GroupCoordinator.destroy

    @functools.wraps(destroy)
    def destroy_if_there(self: Any) -> None:
        if dist.is_initialized():
            destroy(self)

    parallel_state.GroupCoordinator.destroy = destroy_if_there


def keep_weights_that_can_be_reloaded(utils: Any) -> None:
    """vLLM packs a linear layer's weight for its CPU kernels and drops the original: new weights have nowhere to go."""
    dispatch = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(dispatch)
    def multiply_unpacked(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2 and not layer.weight.is_meta:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = multiply_unpacked


def pack_reloaded_experts(method: Any) -> None:
    """vLLM packs experts for its CPU kernel when it first loads them, and leaves what is loaded later unpacked: the
    kernel then multiplies with scrambled experts."""
    setup = method.UnquantizedFusedMoEMethod._setup_kernel

    @functools.wraps(setup)
    def setup_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloaded = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if reloaded:
            _pack_experts(self.moe_kernel.fused_experts, layer)

    method.UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack


def _pack_experts(experts: Any, layer: Any) -> None:
    """As in the first load, but in place, where the padding holds packed values and has to be zero again."""
    if experts._use_zentorch:  # takes them as they are
        return
    pack = vars(sys.modules[type(experts).__module__])["cpu_prepack_moe_weight"]
    used = experts.moe_config.intermediate_size_per_partition
    padded = layer.w2_weight.shape[2]
    layer.w13_weight.data[:, used:padded] = 0
    layer.w13_weight.data[:, padded + used :] = 0
    layer.w2_weight.data[:, :, used:] = 0
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data.copy_(pack(weight.data, experts.isa))


def rewind_generators(gpu_model_runner: Any) -> None:
    """A request with a seed whose prompt was read in part has drawn a number too many, and vLLM sets the generator back
    by an offset, which a CPU's has not. It has answered nothing yet: back is where it began."""
    runner = gpu_model_runner.GPUModelRunner
    bookkeep = runner._bookkeeping_sync

    @functools.wraps(bookkeep)
    def rewind_and_bookkeep(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        in_part = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        set_back = {index: generators.pop(index) for index in in_part if index in generators}
        for generator in set_back.values():
            generator.manual_seed(generator.initial_seed())
        kept = bookkeep(self, *args, **kwargs)
        generators.update(set_back)
        return kept

    runner._bookkeeping_sync = rewind_and_bookkeep


def _before(owner: type, method: str, call: Callable[[Any], None]) -> None:
    original = vars(owner)[method]

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        call(self)
        return original(self, *args, **kwargs)

    setattr(owner, method, wrapped)


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.state": gather_on_cpu,
    "mcore_bridge.config.model_config": prefer_sdpa_for_images,
    "megatron.core.jit": do_not_fuse,
    "megatron.core.optimizer.clip_grads": accept_cpu_tensor_types,
    "megatron.core.optimizer.distrib_optimizer": accept_cpu_tensor_types,
    "megatron.core.optimizer.optimizer": accept_cpu_tensor_types,
    "megatron.core.pipeline_parallel.p2p_communication": keep_sent_tensors,
    "megatron.core.tensor_parallel.random": expect_one_generator,
    "megatron.core.transformer.moe.token_dispatcher": make_split_sizes_arrays,
    "vllm.distributed.parallel_state": leave_destroyed_groups_alone,
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": pack_reloaded_experts,
    "vllm.model_executor.layers.utils": keep_weights_that_can_be_reloaded,
    "vllm.v1.worker.gpu_model_runner": rewind_generators,
}

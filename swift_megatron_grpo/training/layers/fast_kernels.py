"""Faster kernels for the same arithmetic, on GPUs (--fast_kernels).

A small micro batch is bound by the host: on one H200 a 1.7B model with four completions per micro batch kept the GPU
busy for 2.0 of 3.4 s. Most of the rest went into torch.compile's guards around one-line functions, into a rotary
embedding of a dozen kernels, and into Transformer Engine's operation fuser around single norms. Larger micro batches
gain as well: the rotary embedding and the additions to the gradient buffer took a tenth of their time.

* rotary embedding: Transformer Engine's kernel for packed sequences (cosines in fp32; upstream rounds them to bf16)
* weight gradients: the matrix product adds to the fp32 gradient buffer itself
* SwiGLU and RMSNorm: Transformer Engine's kernels, called directly
* SwiGLU of experts: kernels of this package (weighted_swiglu.py)
* adding the residual, if there is no dropout: a plain addition
* experts, also on a CPU: one kernel per product for all of them (grouped_experts.py), a token's row is sent once to a
  rank, and tokens that are sorted already are not sorted (row_dispatch.py)
* adapters, also on a CPU: their products add to the output of the frozen layer (adapter_layers.py)
* --recompute_elementwise, in micro batches that are bound by the GPU: outputs of norms and SwiGLU are recomputed right
  before the layer after them runs backward. Of the 44 kB that a token keeps in a layer of Qwen3-0.6B, these are 10 kB,
  and elementwise functions of tensors that are kept anyway.

A module that a kernel does not support keeps its own implementation. On a CPU nothing else is replaced.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mcore_bridge.model import GPTModel
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.transformer.mlp import MLP

from swift_megatron_grpo.training.moe.row_dispatch import send_rows_once, skip_sorting

# Recomputation costs the host 0.1 ms per linear layer. From this many tokens on, the GPU is busy for longer than that.
MIN_TOKENS_TO_RECOMPUTE = 4096


def use_fast_kernels(models: Iterable[GPTModel], trained: bool, recompute_elementwise: bool) -> None:
    """Install the kernels in `models`, before they are wrapped. `trained`: they will have gradient buffers."""
    for model in models:
        skip_sorting(model)
        send_rows_once(model)
        if not next(model.parameters()).is_cuda:
            continue
        config = model.config
        if not config.activation_func_fp8_input_store and not config.cpu_offloading:
            fused_bias_swiglu.SwiGLUFunction = _swiglu()
        if _weighs_swiglu(config):
            from swift_megatron_grpo.training.moe.weighted_swiglu import WeightedSwiGLU

            fused_bias_swiglu.WeightedSwiGLUFunction = WeightedSwiGLU
        if config.hidden_dropout == 0:
            config.bias_dropout_fusion = False
        if _has_plain_rotary_embedding(model):
            config.apply_rope_fusion = True
        recomputes = recompute_elementwise and config.recompute_granularity != "full" and not config.fp8
        for module in list(model.modules()):
            _install_in(module, trained, recomputes)


def _install_in(module: Any, trained: bool, recomputes: bool) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    if type(module) is te.RMSNorm:
        module.forward = partial(_rms_norm, module, module.forward)
    elif isinstance(module, TransformerEngineBaseModule) and trained:
        module.fuse_wgrad_accumulation = True  # Transformer Engine reads it in every forward pass
    if recomputes and isinstance(module, MLP):
        module.linear_fc2.forward = partial(_swiglu_recomputed_in_backward, module.linear_fc2.forward)
    elif recomputes and isinstance(module, te.LayerNormLinear) and module.normalization == "RMSNorm":
        module.forward = partial(_norm_recomputed_in_backward, module, module.forward)


def _weighs_swiglu(config: Any) -> bool:
    """Return True if experts call Megatron's SwiGLU that is weighted by the probabilities of the router."""
    return (
        config.num_moe_experts is not None
        and config.activation_func is F.silu
        and config.gated_linear_unit
        and config.bias_activation_fusion
        and not config.activation_func_fp8_input_store
    )


def _has_plain_rotary_embedding(model: GPTModel) -> bool:
    """Return True if the rotary embedding has one angle per position and dimension, from a table, as the kernel has."""
    config = model.config
    return (
        type(model) is GPTModel
        and model.position_embedding_type == "rope"
        and not config.multi_latent_attention
        and not config.rotary_interleaved
        and config.attention_scaling == 1
        and not config.mtp_num_layers
    )


def _swiglu() -> type[torch.autograd.Function]:
    import transformer_engine_torch as kernels

    class SwiGLU(torch.autograd.Function):
        """Replaces Megatron's class of the same arguments."""

        @staticmethod
        def forward(ctx: Any, gate_and_up: torch.Tensor, fp8_input_store: bool, cpu_offload: bool) -> torch.Tensor:
            """Compute SwiGLU: [tokens, batch, 2 * ffn] -> [tokens, batch, ffn]."""
            ctx.save_for_backward(gate_and_up)
            result: torch.Tensor = kernels.swiglu(gate_and_up, None)
            return result

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            [gate_and_up] = ctx.saved_tensors
            return kernels.dswiglu(grad.contiguous(), gate_and_up, None), None, None

    return SwiGLU


@dataclass(frozen=True, slots=True)
class NormSettings:
    eps: float
    zero_centered: bool  # the weight is 1 plus the parameter
    forward_margin: int  # multiprocessors that are left to communication
    backward_margin: int


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: NormSettings) -> torch.Tensor:
        """Normalize the last dimension of x, whose size is the size of weight."""
        import transformer_engine_torch as kernels
        from transformer_engine.pytorch.constants import TE_DType

        rows = x.contiguous().view(-1, weight.numel())
        y, _, deviations = kernels.rmsnorm_fwd(
            rows, weight, settings.eps, None, None, TE_DType[x.dtype], settings.forward_margin, settings.zero_centered
        )
        ctx.save_for_backward(rows, deviations, weight)
        ctx.settings = settings
        output: torch.Tensor = y.view(x.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        import transformer_engine_torch as kernels

        rows, deviations, weight = ctx.saved_tensors
        d_rows, d_weight = kernels.rmsnorm_bwd(
            grad.contiguous().view(rows.shape), rows, deviations, weight, ctx.settings.backward_margin,
            ctx.settings.zero_centered,
        )  # fmt: skip
        return d_rows.view(grad.shape), d_weight, None


def _swiglu_recomputed_in_backward(original: Any, hidden: torch.Tensor) -> Any:
    """Run `original`, the forward of fc2, on hidden [tokens, batch, ffn]; SwiGLU's node saves what recomputes it."""
    import transformer_engine_torch as kernels

    output = original(hidden)
    node: Any = (
        producing_node(hidden, "SwiGLUBackward") if hidden.shape[:-1].numel() >= MIN_TOKENS_TO_RECOMPUTE else None
    )
    if node is not None:
        drop_and_recompute(
            hidden, lambda out: out.view(-1).copy_(kernels.swiglu(node.saved_tensors[0], None).view(-1)), output[0]
        )
    return output


def _norm_recomputed_in_backward(module: Any, original: Any, x: torch.Tensor) -> Any:
    """Run the norm and the linear layer after it on x [tokens, batch, hidden]; the node saves x and its norm."""
    output = original(x)
    if module.return_layernorm_output or x.shape[:-1].numel() < MIN_TOKENS_TO_RECOMPUTE:  # adapters read the norm too
        return output
    node: Any = producing_node(output[0], "_LayerNormLinearBackward")
    if node is not None:
        kept = x.detach()
        weights = (module.weight, module.layer_norm_weight)
        for saved in node.saved_tensors:
            if saved is None or saved.dtype != kept.dtype or saved.numel() != kept.numel():
                continue
            if not any(shares_memory(saved, other) for other in (kept, *weights)):
                drop_and_recompute(saved, lambda out: _norm_into(out, module, kept), output[0])
                break
    return output


def _norm_into(out: torch.Tensor, module: Any, x: torch.Tensor) -> None:
    import transformer_engine_torch as kernels
    from transformer_engine.pytorch.constants import TE_DType

    width = x.shape[-1]
    kernels.rmsnorm_fwd(
        x.contiguous().view(-1, width), module.layer_norm_weight, module.eps, out.view(-1, width), None,
        TE_DType[x.dtype], module.fwd_ln_sm_margin, module.zero_centered_gamma,
    )  # fmt: skip


def _rms_norm(module: Any, original: Any, x: torch.Tensor) -> Any:
    if x.dtype != module.weight.dtype or torch.is_autocast_enabled():
        return original(x)
    margins = module._sm_margins
    settings = NormSettings(module.eps, module.zero_centered_gamma, margins["forward"], margins["backward"])
    return RMSNorm.apply(x, module.weight, settings)


def drop_and_recompute(saved: torch.Tensor, compute: Callable[[torch.Tensor], object], output: torch.Tensor) -> None:
    """Release the memory of `saved` now, and recompute it when backward reaches `output`.

    `output`: of the layer that has saved the tensor. `compute` writes the same values into the tensor it is given.
    Autograd's saved tensor stays the same object, and only its storage is emptied; hooks on saved tensors would also
    replace the weights, which are saved next to it, and so lose their gradient buffers.
    """
    storage = saved.untyped_storage()
    pending = [(storage, storage.nbytes(), compute)]
    dtype = saved.dtype
    shape = saved.shape
    stride = saved.stride()
    storage.resize_(0)

    def recompute(_: torch.Tensor) -> None:
        # The graph, and this function with it, lives until the end of backward; the objects it refers to must not.
        while pending:
            storage, size, compute = pending.pop()
            storage.resize_(size)
            # A second tensor on the same storage: autograd would count writing into the saved one as a modification.
            alias = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, stride)
            with torch.no_grad():
                compute(alias)

    output.register_hook(recompute)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both tensors have the same storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def producing_node(tensor: torch.Tensor, name: str) -> torch.autograd.graph.Node | None:
    """Return the autograd node that produced the tensor, looking through views, or None if it has another name."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    return node if node is not None and node.name() == name else None

"""Compare a model's attention kernels with exact arithmetic, forward and backward, before anything is trained.

Transformer Engine chooses a kernel by head size, GPU and installed packages, and some are wrong on some GPUs: backward
of cuDNN's kernel for packed sequences has read workspace that nobody wrote, so the first step was right and the
gradients of later ones grew to 1e7 or NaN. So free memory is filled with NaN first. The check takes a second per
kernel, and it costs no random numbers of the run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
import torch.nn.functional as F
from mcore_bridge import ModelConfig
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from swift_megatron_grpo.packing.plan import zigzag_positions
from swift_megatron_grpo.runtime.parallel import RankPosition

ALLOWED_ERROR = 0.03  # of a tensor's norm; rounding to bf16 costs less than 0.01
LENGTHS = (333, 64, 1, 450)  # of the sequences of a pack: below, at and above multiples of a kernel's tiles
POISON_BYTES = 2**30


class WrongAttentionKernel(RuntimeError):
    """A kernel of this installation computes wrong outputs or gradients."""


@dataclass(frozen=True)
class Shape:
    """Identify the kernel of a tensor-parallel rank."""

    heads: int
    groups: int  # of keys and values
    key_channels: int
    value_channels: int
    scale: float


def check_attention(models: Iterable[torch.nn.Module], parallel: RankPosition) -> None:
    """Raise WrongAttentionKernel if an attention layer's output or gradients are wrong on this rank.

    Context-parallel ranks call it together. Layers with windows, attention sinks, dropout or fp8 are not compared.
    """
    checked = set[Shape]()
    messages = list[str]()
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, Attention)]
    for layer in filter(_is_comparable, layers):
        shape = _shape(layer)
        if shape in checked:
            continue
        checked.add(shape)
        errors = compare(layer, shape, parallel)
        if wrong := {name: error for name, error in errors.items() if not error <= ALLOWED_ERROR}:
            missed = ", ".join(f"the {name} by {error:.2g}" for name, error in wrong.items())
            fault = f"relative to exact arithmetic it misses {missed}; {ALLOWED_ERROR} is allowed"
            messages.append(_message(layer.config, shape, fault))
    if messages:  # only now, because other context-parallel ranks may have found no error, and compared the next kernel
        raise WrongAttentionKernel(messages[0])


def compare(layer: Attention, shape: Shape, parallel: RankPosition) -> dict[str, float]:
    """Return the errors of a layer's output and gradients on random packed sequences, by name.

    An error is relative to the norm of the exact tensor; NaN or infinity anywhere makes it NaN or infinite. Raises
    WrongAttentionKernel if the output has another size.
    """
    multiple = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
    lengths = [-(-length // multiple) * multiple for length in LENGTHS]
    bounds = [0, *accumulate(lengths)]
    tokens = bounds[-1]
    device = next(layer.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    dtype = layer.config.params_dtype

    def random(heads: int, channels: int) -> torch.Tensor:  # [tokens, heads, channels], alike on context-parallel ranks
        return torch.randn(tokens, heads, channels, device=device, generator=generator).to(dtype)

    whole = [  # queries, keys and values
        random(shape.heads, shape.key_channels),
        random(shape.groups, shape.key_channels),
        random(shape.groups, shape.value_channels),
    ]
    direction = random(shape.heads, shape.value_channels).flatten(1)
    held = torch.tensor(zigzag_positions(lengths, parallel.cp_rank, parallel.cp_size), device=device)
    inputs = [tensor[held].requires_grad_() for tensor in whole]
    poison_free_memory(device)
    output = _run(layer, inputs, bounds, max(lengths)).reshape(len(held), -1)
    if output.shape[1] != direction.shape[1]:
        fault = f"its output has {output.shape[1]} channels instead of {direction.shape[1]}"
        raise WrongAttentionKernel(_message(layer.config, shape, fault))
    poison_free_memory(device)
    gradients = torch.autograd.grad(output, inputs, direction[held])
    exact_inputs = [tensor.double().requires_grad_() for tensor in whole]
    exact_output = exact_attention(exact_inputs, bounds, shape.scale)
    exact_gradients = torch.autograd.grad(exact_output, exact_inputs, direction.double())
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    pairs = zip((output, *gradients), (exact_output, *exact_gradients), strict=True)
    return {name: relative_error(found, exact[held]) for name, (found, exact) in zip(names, pairs, strict=True)}


def exact_attention(inputs: Sequence[torch.Tensor], bounds: Sequence[int], scale: float) -> torch.Tensor:
    """Return causal attention within each sequence of a pack, [t, heads * e], which torch computes plainly in fp64.

    `inputs`: queries [t, heads, d], keys [t, groups, d] and values [t, groups, e].
    """
    outputs = []
    for begin, end in pairwise(bounds):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in inputs)  # [heads or groups, s, .]
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the exact tensor's norm."""
    return float((found.double() - exact).norm() / exact.norm())


def poison_free_memory(device: torch.device) -> None:
    """Fill memory that the allocator hands out next with NaN: fresh memory of a GPU is zero and hides what reads it."""
    if device.type == "cuda":
        torch.full((POISON_BYTES // 2,), torch.nan, device=device, dtype=torch.bfloat16)


def _is_comparable(layer: Attention) -> bool:
    config = layer.config
    special = config.window_size is not None or config.softmax_type != "vanilla" or config.attention_dropout > 0
    special |= config.fp8_dot_product_attention or config.qk_clip or config.log_max_attention_logit
    return isinstance(layer.core_attention, TEDotProductAttention) and layer.attention_type == "self" and not special


def _shape(layer: Attention) -> Shape:
    scale = layer.softmax_scale if isinstance(layer, MultiLatentAttention) else layer.config.softmax_scale
    latent = isinstance(layer, MultiLatentAttention)  # its keys are one group per head when the kernel reads them
    return Shape(
        heads=layer.num_attention_heads_per_partition,
        groups=layer.num_attention_heads_per_partition if latent else layer.num_query_groups_per_partition,
        key_channels=layer.key_hidden_size,
        value_channels=layer.val_hidden_size,
        scale=layer.key_hidden_size**-0.5 if scale is None else scale,
    )


def _run(layer: Attention, inputs: Sequence[torch.Tensor], bounds: Sequence[int], longest: int) -> torch.Tensor:
    """Return the output, [t, heads * e] or [t, heads, e]."""
    starts = torch.tensor(bounds, dtype=torch.int32, device=inputs[0].device)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    query, key, value = inputs
    surplus = key.shape[-1] - value.shape[-1]
    if surplus and isinstance(layer, MultiLatentAttention):  # as mcore-bridge trains packed sequences
        value = F.pad(value, [0, surplus])
        layer.core_attention.hidden_size_per_attention_head_v = value.shape[-1]
    output = layer.core_attention(query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
    if value is not inputs[2]:
        output = output.reshape(len(query), -1, value.shape[-1])[..., :-surplus]
    return cast(torch.Tensor, output)


def _message(config: ModelConfig, shape: Shape, fault: str) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
    cudnn = torch.backends.cudnn.version()
    channels = str(shape.key_channels)
    if shape.value_channels != shape.key_channels:
        channels += f" (values: {shape.value_channels})"
    return (
        f"The attention kernel of --attention_backend {config.attention_backend.name} is wrong on {device} with "
        f"{channels} channels per head (cuDNN {cudnn}): {fault}. Use another kernel: --attention_backend flash (with "
        "--context_parallel_size above 1 it needs flash-attn), or --attention_backend unfused, whose memory grows with "
        "the square of the length. A newer nvidia-cudnn package may also help. --check_attention false starts all the "
        "same."
    )

"""Changes to Megatron, and to models that ms-swift has built and loaded, before they are wrapped for training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from swift_megatron_grpo.training.layers.adapter_layers import add_adapters_in_place
from swift_megatron_grpo.training.layers.fast_kernels import use_fast_kernels
from swift_megatron_grpo.training.layers.torch_attention import attend_with_torch
from swift_megatron_grpo.training.moe.grouped_experts import group_products
from swift_megatron_grpo.training.optimizer.adam_portions import step_adam_in_portions
from swift_megatron_grpo.training.upstream_fixes import linear_attention, marks, multi_tensor_kernels, routers
from swift_megatron_grpo.training.vision_tower import guard_vision_towers


def prepare_trained(
    models: Sequence[torch.nn.Module],
    fast_kernels: bool,
    recompute_elementwise: bool,
    overlap_grad_reduce: bool,
    extra_kwargs: Mapping[str, Any] | None,  # --megatron_extra_kwargs
) -> str | None:
    """Correct marks and install kernels in the policy. Return a note for the log; None: there is nothing to note."""
    prepare_optimizer()
    marks.mark_experts(models)
    linear_attention.unmark_gathered_projections(models)
    _prepare(models)
    if fast_kernels:
        add_adapters_in_place(models, gradients_have_hooks=overlap_grad_reduce)
        use_fast_kernels(models, trained=True, recompute_elementwise=recompute_elementwise)
        group_products(models, gradients_have_hooks=overlap_grad_reduce)
    return routers.freeze_router_bias(models, extra_kwargs)


def prepare_frozen(models: Sequence[torch.nn.Module], fast_kernels: bool) -> None:
    """Freeze the reference copy, and install kernels in it."""
    for model in models:
        model.requires_grad_(False).eval()
    _prepare(models)
    if fast_kernels:
        use_fast_kernels(models, trained=False, recompute_elementwise=False)
        group_products(models, gradients_have_hooks=False)


def prepare_optimizer() -> None:
    """Install the optimizer's kernels in this process; without them the same steps are slower or need more memory."""
    multi_tensor_kernels.clip_with_transformer_engine()
    multi_tensor_kernels.bound_tensor_handles()
    step_adam_in_portions()


def _prepare(models: Sequence[Any]) -> None:
    guard_vision_towers(models)
    linear_attention.leave_bounds_unread(models)
    attend_with_torch(models)
    for model in models:
        model.config.batch_p2p_sync = False  # a wait for the GPU after each exchange of stages, for a race in PyTorch 1
        # router_replay.py replaces what ms-swift installs for --router_replay_mode: its dispatcher counts the tokens of
        # experts on the host, which waits for the GPU in every layer, because its routing may name an expert twice.
        model.config.moe_enable_routing_replay = False
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.router_replay = None

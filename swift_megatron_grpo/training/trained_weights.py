"""The weights that a run trains: that there are some, complete on all ranks, finite, and their size on disk."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from mcore_bridge import unwrap_model
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from swift_megatron_grpo.runtime.parallel import sum_over_ranks
from swift_megatron_grpo.settings.config import SavedParts


class TrainedWeights:
    """The weights of this rank that an optimizer updates."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        everything = {
            f"{name} of chunk {chunk}" if chunk else name: parameter
            for chunk, model in enumerate(unwrap_model(list(models)))
            for name, parameter in model.named_parameters()
        }
        self._named = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        self.total = sum(parameter.numel() for parameter in everything.values())
        self.trained = sum(parameter.numel() for parameter in self._named.values())

    @property
    def passes_of_backward(self) -> int:
        """FLOPs of backward relative to forward: 2, or 1 if most weights are frozen and need no gradient."""
        return 2 if 2 * self.trained >= self.total else 1

    def broken(self, device: torch.device) -> torch.Tensor:
        """Return 1 if any weight of this rank is NaN or infinite, else 0, without waiting for the GPU.

        The sum of the absolute values of each weight is read, in one kernel for many weights: NaN and infinity survive
        additions, and a sum of finite weights is finite.
        """
        by_type: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for parameter in self._named.values():
            by_type[parameter.dtype].append(parameter.detach())
        sums = [torch.stack(torch._foreach_norm(weights, 1)).float() for weights in by_type.values()]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=device)
        return (~torch.cat(sums).isfinite().all()).double()

    def broken_names(self) -> list[str]:
        return [name for name, parameter in self._named.items() if not bool(parameter.isfinite().all())]


def check_trained(models: Iterable[torch.nn.Module], frozen_by: str) -> None:
    """Raise ValueError, on all ranks, if no rank trains any weight. `frozen_by`: the flags that freeze weights."""
    weights = TrainedWeights(models)
    device = torch.device(torch.cuda.current_device())
    numbers = torch.tensor([weights.total, weights.trained], dtype=torch.int64, device=device)
    total, trained = sum_over_ranks(numbers).tolist()
    if trained == 0:
        raise ValueError(
            f"none of the model's weights ({total:,} on all ranks) is trained: {frozen_by or 'every one is frozen'}; "
            "freeze fewer of them, or use --trainable_parameters or --trainable_parameters_regex for those to train"
        )


def gather_parameters(models: Sequence[torch.nn.Module]) -> None:
    """Gather on every rank what --overlap_param_gather leaves to the next forward pass.

    After an update each data-parallel rank has the new values of its own shard. The forward pass gathers the others,
    module by module. Whatever else reads weights (a weight sync, a checkpoint, offloading) must call this before.
    Without an update since the last call it does nothing.
    """
    for model in models:
        if not isinstance(model, DistributedDataParallel) or not model.ddp_config.overlap_param_gather:
            continue
        for buckets in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            if not buckets.param_gather_dispatched or buckets.param_gather_handle is not None:
                buckets.start_param_sync(force_sync=True)


def saved_bytes(models: Iterable[torch.nn.Module], parts: SavedParts, kept_bytes: int) -> float:
    """Return the share of this rank in the size of a checkpoint. The shares of all ranks add up.

    `kept_bytes`: of the tensors that are saved without being trained. The result is a lower bound: formats add a few
    percent to small models, and nearly nothing to large ones.
    """
    weights = adapter = optimizer = 0.0
    for parameter in (parameter for model in models for parameter in model.parameters()):
        count = parameter.numel() * _share(parameter)
        weights += count * parameter.element_size()
        if parameter.requires_grad:
            adapter += count * parameter.element_size()
            optimizer += count * parts.optimizer_bytes
    trained = adapter if parts.adapter_only else weights
    kept = kept_bytes / torch.distributed.get_world_size()
    return trained * parts.copies + weights * parts.merged_copies + kept * parts.whole_models + optimizer


def _share(parameter: torch.nn.Parameter) -> float:
    """Return the share of this rank in a parameter: one of the data-parallel ranks with the same values saves it."""
    if hasattr(parameter, "allreduce") and not parameter.allreduce:  # Megatron's mark of experts
        return 1 / float(mpu.get_expert_data_parallel_world_size())
    if not (param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)):
        return 0.0
    return 1 / float(mpu.get_data_parallel_world_size(with_context_parallel=True))

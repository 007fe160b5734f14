"""The weights that a run trains: that there are some, and that an update leaves all of them finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from mcore_bridge import unwrap_model

from swift_megatron_grpo.runtime.parallel import sum_over_ranks


class TrainedWeights:
    """The weights of this rank that an optimizer updates."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        everything = {
            f"{name} of chunk {chunk}" if chunk else name: parameter
            for chunk, model in enumerate(unwrap_model(list(models)))
            for name, parameter in model.named_parameters()
        }
        self._named = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        self._total = sum(parameter.numel() for parameter in everything.values())
        self._trained = sum(parameter.numel() for parameter in self._named.values())

    @property
    def passes_of_backward(self) -> int:
        """FLOPs of backward relative to forward: 2, or 1 if most weights are frozen and need no gradient."""
        return 2 if 2 * self._trained >= self._total else 1

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
        """Return the names of this rank's weights that are NaN or infinite."""
        return [name for name, parameter in self._named.items() if not bool(parameter.isfinite().all())]


def check_trained(models: Iterable[torch.nn.Module], frozen_by: str) -> None:
    """Raise ValueError, on all ranks, if no rank trains any weight. `frozen_by`: the flags that freeze weights."""
    total = 0
    trained = 0
    for model in models:
        for parameter in model.parameters():
            total += parameter.numel()
            trained += parameter.numel() if parameter.requires_grad else 0
    device = torch.device(torch.cuda.current_device())
    total, trained = sum_over_ranks(torch.tensor([total, trained], dtype=torch.int64, device=device)).tolist()
    if trained == 0:
        raise ValueError(
            f"none of the model's weights ({total:,} on all ranks) is trained: {frozen_by or 'every one is frozen'}; "
            "freeze fewer of them, or use --trainable_parameters or --trainable_parameters_regex for those to train"
        )

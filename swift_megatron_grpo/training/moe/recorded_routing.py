"""The experts that routers have chosen in a pass, as rows of whole samples on every rank that runs their layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from swift_megatron_grpo.packing.plan import Alignment, zigzag_positions
from swift_megatron_grpo.packing.routing import unpack_routing
from swift_megatron_grpo.packing.segments import lay_out
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.training.moe.router_replay import ExpertChoice
from swift_megatron_grpo.types import ExpertRows, Sample


def rows_by_sample(
    choices: Sequence[ExpertChoice],
    assigned: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    align: Alignment,
    share_prompts: bool,
    sequence_parallel: bool,
    num_layers: int,
    position: RankPosition,
) -> dict[int, ExpertRows]:
    """Return the recorded rows of the samples of this data-parallel rank, [t, num_layers, k] with -1 in other layers.

    `assigned`: the indices in `samples` of each micro batch. A collective among the ranks that hold parts of a
    sequence.
    """
    if not choices:  # a stage of layers without experts
        return {}
    layers = [choice.layer for choice in choices]
    rows: dict[int, ExpertRows] = {}
    for number, indices in enumerate(assigned):
        chosen = [samples[index] for index in indices]
        layout = lay_out(chosen, align, share_prompts)
        local = torch.stack([choice.chosen[number] for choice in choices], dim=1)  # [l, layers of the stage, k]
        if sequence_parallel:
            local = torch.cat(_gathered(local, position.tp_group, position.tp_size))
        packed = _whole_sequences(local, layout.lengths, position).cpu()
        rows |= dict(zip(indices, unpack_routing(packed, layers, chosen, layout, num_layers), strict=True))
    return rows


def _whole_sequences(local: torch.Tensor, lengths: Sequence[int], position: RankPosition) -> torch.Tensor:
    """Gather the tokens of all context-parallel ranks: [l, ...] to [n, ...]."""
    if position.cp_size == 1:
        return local
    parts = _gathered(local, position.cp_group, position.cp_size)
    whole = local.new_empty((sum(lengths), *local.shape[1:]))
    for rank, part in enumerate(parts):
        whole[torch.tensor(zigzag_positions(lengths, rank, position.cp_size), device=local.device)] = part
    return whole


def _gathered(local: torch.Tensor, group: dist.ProcessGroup, size: int) -> list[torch.Tensor]:
    """Return the tensors of all ranks of a group, which have one shape."""
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts

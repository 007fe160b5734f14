"""Completes the updated weights where --overlap_param_gather leaves that to the next forward pass.

After an update each data-parallel rank has the new values of its own shard. The forward pass gathers the others, module
by module. Whatever else reads weights (a weight sync, a checkpoint, offloading) must call `gather_parameters` before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel


def gather_parameters(models: Sequence[torch.nn.Module]) -> None:
    """Gather what is not gathered yet, on every rank. Without an update since the last call this does nothing."""
    for model in models:
        if not isinstance(model, DistributedDataParallel) or not model.ddp_config.overlap_param_gather:
            continue
        for buckets in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            if not buckets.param_gather_dispatched or buckets.param_gather_handle is not None:
                buckets.start_param_sync(force_sync=True)

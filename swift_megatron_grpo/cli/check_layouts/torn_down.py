"""Destroy what Megatron has created in this process, so that another layout can be created in it."""

from __future__ import annotations

import os

_ATTENTION_BACKEND = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")  # Megatron refuses another one


class megatron_torn_down:
    """Destroys Megatron's groups on exit, because every layout creates them again; torch's process group stays."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        import gc

        import torch.distributed as dist
        from mcore_bridge.bridge import gpt_bridge
        from megatron.core import mpu
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

        mpu.destroy_model_parallel()
        gpt_bridge.EP_PP_GROUP = None  # mcore-bridge creates it once per process
        unset_num_microbatches_calculator()
        for name in _ATTENTION_BACKEND:
            os.environ.pop(name, None)
        # A layout leaves about 20 groups, and gloo gives each three threads, of which one wakes up a hundred times a
        # second: after forty layouts this took most of two cores. A group is destroyed once torch and the model release
        # it, and the model once its hooks do, whose references Python's garbage collector cannot see.
        gc.unfreeze()  # frozen objects are neither listed nor collected
        for candidate in gc.get_objects():
            if type(candidate) is DistributedDataParallel:
                vars(candidate).clear()
        for group in list(dist.distributed_c10d._world.pg_names):
            if group is not dist.group.WORLD and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)
        gc.collect()

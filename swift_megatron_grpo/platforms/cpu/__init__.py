"""The CPU platform: megatron-core, mcore-bridge, ms-swift and vLLM as they are, on a machine without a GPU.

For whoever starts a training process: call `activate()` once, before megatron.core or mcore_bridge execute. Nothing
else in this package knows that the platform exists, and it serves ms-swift's own trainers too. What runs is the real
arithmetic, sharding and plumbing; what it cannot say anything about is CUDA kernels, NCCL, streams, CUDA graphs,
sleeping engines, fp8.

One difference remains visible: host and device are the same memory, so `.to("cpu")`, `.cuda()` and `.pin_memory()`
return the tensor itself. Code that wants a snapshot must clone.
"""

from __future__ import annotations

import os
import sys

_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core asserts it for sequence parallelism
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a tiny model trains, and needs a C++ compiler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's default is half of the memory, for every rank
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: weights are handed over as tensors
    "VLLM_PLUGINS": "",  # ms-swift's vLLM plugin imports torchvision, which has no CPU build beside this torch
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_AOT_COMPILE": "0",  # it insists on the dynamo that is disabled above; without it the model runs eagerly
}
_active = False


def activate() -> None:
    """Make this process a CPU process for everything imported from here on. Idempotent."""
    global _active
    if _active:
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform would hide a usable CUDA device: it is only for machines without one")
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("megatron.core is already imported: activate the CPU platform before it")

    prepare_environment()

    from swift_megatron_grpo.import_hooks import after_import
    from swift_megatron_grpo.platforms.cpu import cuda, devices, distributed, fixes
    from swift_megatron_grpo.platforms.cpu.transformer_engine import tree

    devices.install()
    cuda.install()
    distributed.install()
    tree.install()
    for module_name, fix in fixes.AFTER_IMPORT.items():
        after_import(module_name, fix)
    _active = True


def prepare_environment() -> None:
    """What libraries read from the environment, for this process and those that it starts."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def prepare_server_environment() -> None:
    """For vLLM in processes of its own: it would pin each worker's threads, and wants a NUMA node for each to do so."""
    prepare_environment()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def activate_engine() -> None:
    """For a process that runs vLLM and no Megatron: only what vLLM gets wrong without a GPU."""
    from swift_megatron_grpo.import_hooks import after_import
    from swift_megatron_grpo.platforms.cpu import fixes

    for module_name, fix in fixes.AFTER_IMPORT.items():
        if module_name.startswith("vllm."):
            after_import(module_name, fix)


def is_active() -> bool:
    return _active

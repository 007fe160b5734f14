"""The CPU platform: runs unmodified megatron-core, mcore-bridge, ms-swift and vLLM on a machine without a GPU.

A training process calls `activate()` once, before megatron.core or mcore_bridge are imported. No other folder of this
package depends on the platform, and it also works for ms-swift's own trainers. Arithmetic, sharding and communication
are the real ones. CUDA kernels, NCCL, streams, CUDA graphs, sleeping engines and fp8 are not covered.

One difference remains visible: host and device share memory, so `.to("cpu")`, `.cuda()` and `.pin_memory()` return the
tensor itself. Code that needs a snapshot must clone.

devices.py           redirects every CUDA device in torch's API to the CPU
cuda.py              the functions of torch.cuda that do not need a GPU
distributed.py       torch.distributed on gloo in place of NCCL
stand_in.py          module trees in place of packages that need CUDA
transformer_engine/  Transformer Engine's API in plain PyTorch
linear_attention/    flash-linear-attention's API, and vLLM's linear attention, in plain PyTorch
routed_experts.py    the experts that vLLM's routers choose, from its first model runner
fixes.py             fixes of upstream code that fails without a GPU
forks.py             ranks that are forks of torchrun, which imports for all of them
torchvision_operators.py  makes torchvision importable, in every process with a CPU build of torch
"""

import os
import sys

_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core asserts it for sequence parallelism
    "TORCHDYNAMO_DISABLE": "1",  # compilation takes longer than training a tiny model, and needs a C++ compiler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's default is half of the memory for every rank
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core in this process: weights are passed as tensors
    "VLLM_PLUGINS": "",  # ms-swift's vLLM plugin imports torchvision, which has no CPU build for this torch
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_AOT_COMPILE": "0",  # needs dynamo, which is disabled above; without it the model runs eagerly
}
ENGINE_ON_CPU = "SWIFT_MEGATRON_GRPO_ENGINE_ON_CPU"  # set for the processes of a server; plugin/autoload.py reads it
_active = False
_engine_active = False


def activate() -> None:
    """Make this process a CPU process for everything that is imported afterwards. Idempotent."""
    global _active
    if _active:
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform would hide a usable CUDA device; it is only for machines without one")
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise RuntimeError("megatron.core is already imported; activate the CPU platform before importing it")

    prepare_environment()

    from swift_megatron_grpo.platforms.cpu import cuda, devices, distributed
    from swift_megatron_grpo.platforms.cpu.linear_attention import fla
    from swift_megatron_grpo.platforms.cpu.transformer_engine import tree

    devices.install()
    cuda.install()
    distributed.install()
    tree.install()
    fla.install()
    _fix_modules(prefix="")
    _active = True


def prepare_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def prepare_server_environment() -> None:
    """Set the environment of vLLM in separate processes: do not pin threads, which needs a NUMA node per worker."""
    prepare_environment()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ[ENGINE_ON_CPU] = "1"


def activate_engine() -> None:
    """Install only the fixes of vLLM, in a process that runs vLLM without Megatron. Idempotent."""
    global _engine_active
    if _active or _engine_active:
        return
    _fix_modules(prefix="vllm.")
    _engine_active = True


def _fix_modules(prefix: str) -> None:
    from swift_megatron_grpo.platforms.cpu import fixes
    from swift_megatron_grpo.runtime.import_hooks import after_import

    for module_name, fix in fixes.AFTER_IMPORT.items():
        if module_name.startswith(prefix):
            after_import(module_name, fix)

"""Prepare a process that is a rank of this trainer, or that ranks are forked from, before it imports Megatron."""

import ctypes
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from swift_megatron_grpo.plugin import command_line

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_LINEAR = re.compile("linear|delta|hybrid|mamba|gla|kda|rwkv", re.IGNORECASE)  # in the config of a model that uses fla
_OTHER_MODELS = ("reward_model", "teacher_model")  # flags
_IMPORTS = (  # of a rank, whatever its model is, vLLM with them
    "swift.megatron.pipelines.train.rlhf",
    "swift_megatron_grpo.trainer.grpo_trainer",
    "swift_megatron_grpo.arguments.grpo_arguments",
)


def prepare(args: Sequence[str]) -> None:
    """Make this process train with this package, for a rank with these arguments.

    It collects no garbage until it parses its arguments: a fifth of the time that its imports take would go to looking
    for garbage in what they make, which stays.
    """
    from swift_megatron_grpo.plugin.register import register
    from swift_megatron_grpo.runtime.import_hooks import after_import

    hook_platform()
    leave_out_linear_attention(args)
    after_import("datasets.download.download_manager", leave_environment_alone)
    register()
    gc.disable()


def import_for_forks(args: Sequence[str]) -> None:
    """Prepare this process as a rank with these arguments, and import what it will import."""
    prepare(args)
    for module in _IMPORTS:
        importlib.import_module(module)
    gc.freeze()  # or the garbage collector would write to, and so copy, memory that the forks share
    gc.enable()


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Stop this rank when torchrun is killed, and end it at Ctrl-C, without a traceback, before it trains."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in environ:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def leave_environment_alone(download_manager: ModuleType) -> None:
    """Keep datasets from removing all environment variables and setting them again for each file that it reads.

    A thread of NCCL that reads a variable at that moment crashes the rank: glibc does not guard getenv against setenv.
    """
    os.environ["HF_DATASETS_STACK_MULTIPROCESSING_DOWNLOAD_PROGRESS_BARS"] = "1"  # all that datasets wants to change
    download_manager.__dict__["stack_multiprocessing_download_progress_bars"] = nullcontext


def leave_out_linear_attention(args: Sequence[str]) -> None:
    """Hide flash-linear-attention from a rank whose model, in a local folder, cannot use it.

    ms-swift, mcore-bridge and Megatron import it whatever the model is, which takes six seconds on an H200.
    """
    config = Path(command_line.parse_flag(args, "model") or os.devnull, "config.json")
    others = any(command_line.parse_flag(args, flag) for flag in _OTHER_MODELS)
    if not others and config.is_file() and not _LINEAR.search(config.read_text(encoding="utf-8")):
        modules: dict[str, Any] = sys.modules
        modules["fla"] = None  # importing it raises ImportError, as if it were not installed


def hook_platform() -> None:
    """Activate the CPU platform, where there is no accelerator, before the first import that needs CUDA."""
    from swift_megatron_grpo.runtime.import_hooks import before_import

    for name in ("mcore_bridge", "megatron.core"):  # whichever comes first
        before_import(name, _activate_platform)


def _activate_platform() -> None:
    if not has_accelerator():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()


def has_accelerator() -> bool:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"  # Megatron has no Metal backend

"""The imports of each kind of fork server, and the programs that a forked process runs, each a command of a user."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# ms-swift sets these to ERROR in ranks whose local rank is not 0. It reads LOCAL_RANK at import, too early for a fork.
_RANK_LOGGERS = ("swift", "modelscope")

# What transformers and vLLM import when they load a config or a processor, or start an engine: up to half a second.
_AT_FIRST_USE = (
    "transformers.tokenization_mistral_common",
    "transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.renderers.hf",
    "scipy.io",
    "setproctitle",
)


def preload_trainer() -> None:
    """Import the modules of a rank of `megatron rlhf --rlhf_type grpo`, including CPU platform and plugin."""
    from swift_megatron_grpo.platforms.cpu import activate, cuda

    activate()
    from swift_megatron_grpo.plugin.register import register

    register()
    import_all(
        "swift.megatron.pipelines.train.rlhf",
        "swift_megatron_grpo.trainer.grpo_trainer",
        "swift_megatron_grpo.arguments.grpo_arguments",
        "swift_megatron_grpo.cli.check_layouts.ranks",
        "swift.infer_engine",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.models.qwen3_moe",
        "vllm.model_executor.models.qwen3_5",
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "vllm.model_executor.models.qwen3_vl_moe",
        "vllm.model_executor.models.mixtral",
        "transformers.models.qwen2_vl.modeling_qwen2_vl",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "transformers.models.qwen4_exp.configuration_qwen4_exp",
        "transformers.models.glm5_next.configuration_glm5_next",
        "swift_megatron_grpo.arguments.command_line",
        "qwen_vl_utils",
        "datasets",
        "pandas",
        "matplotlib.pyplot",
        "swift.loss_scale",
        *_AT_FIRST_USE,
    )
    from swift.infer_engine import GRPOVllmEngine
    from swift.megatron import megatron_rlhf_main
    from transformers.models.auto.video_processing_auto import video_processor_class_from_name

    cuda.install()  # vLLM's CPU worker replaces the stream of torch.cuda; in a run, Megatron has read it before
    del GRPOVllmEngine, megatron_rlhf_main  # ms-swift resolves names lazily
    video_processor_class_from_name("")  # looks into the modules of all types, as for a model with images
    skip_repeated_work()
    map_in_this_process()


def preload_rollout() -> None:
    """Import the modules of the processes of `swift rollout`."""
    from swift_megatron_grpo.platforms.cpu import prepare_server_environment

    prepare_server_environment()
    multiprocessing.set_start_method("fork")  # ms-swift would spawn, and import everything again
    import_all(
        "swift_megatron_grpo.generation.server.deploy",
        "swift_megatron_grpo.generation.server.weight_receiver",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.models.qwen3_moe",
        "swift.loss_scale",
        "swift_megatron_grpo.generation.server.__main__",
        "uvicorn.lifespan.on",
        "pydantic.v1",
        *_AT_FIRST_USE,
    )
    skip_repeated_work()
    fork_engines()


def preload_upstream() -> None:
    """Import ms-swift, Megatron and vLLM without the plugin: for pytest's workers, and for tests of these packages."""
    import torch

    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()
    import_all(
        "swift.megatron.pipelines.train.rlhf",
        "swift.megatron.trainers.grpo_trainer",
        "swift.pipelines.infer.rollout",
        "vllm.v1.engine.async_llm",
        "vllm.v1.worker.gpu_model_runner",
        "hypothesis.strategies",
        "peft",
        "trl.experimental.utils",
        "pandas",
        "fastapi",
    )
    if importlib.util.find_spec("reasoning_gym"):  # scripts/setup_venv.sh --recipes installs it
        import_all("reasoning_gym")


def preload_torch() -> None:
    """Import torch alone: no Triton, which reads TRITON_INTERPRET at import, and no torchvision."""
    import_all("torch")


def preload_plain() -> None:
    """Import the packages of scripts on plain transformers: no platform, no Megatron, no ms-swift.

    The servers of other kinds are forks of this one, so it imports only what a rank imports before the platform.
    """
    import_all(
        "torch",
        "safetensors.torch",
        "datasets",
        "pandas",
        "trl.experimental.utils",
        "peft",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    )


def skip_repeated_work() -> None:
    """Do once, before any fork, what each fork would repeat for seconds over all objects of the imports.

    vLLM replaces its Triton kernels in every module, and unfreezes the garbage collector's objects when it shuts down.
    It sets the level of each of its loggers, which empties a cache in all of thousands. It looks for plugins in all
    installed packages, and this package reads the text of vLLM's scheduler. Transformers formats every config that it
    loads, some of them twenty times in a run, for a line that it does not log.
    """
    from transformers import PretrainedConfig

    from swift_megatron_grpo.generation.vllm.known_scheduler import digest

    digest()
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    gc.unfreeze = lambda: None
    PretrainedConfig.__repr__ = object.__repr__
    if importlib.util.find_spec("vllm.config.logging") is None:  # vLLM 0.25.1
        return
    import_all("vllm.v1.pool.flash_maxsim.flash_maxsim_rerank")
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms.cpu import CpuPlatform

    configure_logging_if_needed(LoggingConfig())
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def fork_engines() -> None:
    """Let vLLM fork its engine and workers, which on a CPU it always spawns, each with 17 CPU seconds of imports.

    On a GPU its default is to fork as well. Each process would spin for a second whenever it waits for a message.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=0)


def map_in_this_process() -> None:
    """Preprocess rows without a worker process, which `--dataset_num_proc 1` starts and the real command covers."""
    from datasets import Dataset

    map_rows = Dataset.map

    @functools.wraps(map_rows)
    def map_here(self: Dataset, *arguments: Any, num_proc: int | None = None, **options: Any) -> Dataset:
        return map_rows(self, *arguments, num_proc=None if num_proc == 1 else num_proc, **options)

    Dataset.map = map_here


def import_all(*names: str) -> None:
    for name in names:
        importlib.import_module(name)


PRELOAD: dict[str, Callable[[], None]] = {
    "trainer": preload_trainer,
    "rollout": preload_rollout,
    "upstream": preload_upstream,
    "plain": preload_plain,
    "torch": preload_torch,
}


def run_megatron_rlhf(arguments: list[str]) -> None:
    """Run a rank as torchrun does: `python .../swift/cli/_megatron/rlhf.py ARGUMENTS`."""
    if os.environ["LOCAL_RANK"] != "0":
        for name in _RANK_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
    from swift.megatron import megatron_rlhf_main

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.argv = [script_of_swift("_megatron/rlhf.py"), *arguments]
    megatron_rlhf_main()


def run_swift_rollout(arguments: list[str]) -> None:
    from swift_megatron_grpo.generation.server.__main__ import main

    sys.argv = [script_of_swift("rollout.py"), *arguments]
    main()


def run_vllm_serve(arguments: list[str]) -> None:
    """Run `python -m vllm.entrypoints.openai.api_server ARGUMENTS`."""
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def run_tasks(arguments: list[str]) -> None:
    """Run the tasks of each job file of cli/check_layouts that arrives on this rank's pipe in the folder."""
    from swift_megatron_grpo.cli.check_layouts.ranks import run_tasks as run

    folder = Path(arguments[0])
    with open(folder / os.environ["RANK"]) as jobs, open(folder / "done", "wb", buffering=0) as done:
        for job in jobs:
            run(json.loads(Path(job.rstrip()).read_text()))
            done.write(b".")


def run_script(arguments: list[str]) -> None:
    """Run `python FILE ARGUMENTS`."""
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def run_python(arguments: list[str]) -> None:
    """Run `python FILE|-c CODE|-m MODULE ARGUMENTS`, a command that this package may change.

    Torch is imported, as the package's entry point expects it. It is called as torch calls it.
    """
    import torch

    first, rest = arguments[0], arguments[1:]
    sys.argv = [first, *rest[first in ("-c", "-m") :]]
    sys.orig_argv = [sys.executable, *arguments]
    torch._import_device_backends()
    if first == "-c":
        run_code(rest)
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def run_torchrun(arguments: list[str]) -> None:
    """Run torchrun as a command of a user, in a fork of the kind "trainer", which has imported for its ranks."""
    from swift_megatron_grpo.plugin import rank, torchrun

    rank.import_for_forks = lambda args: None
    torchrun.end_at_once = lambda code: None  # the server reports the code
    run_python(arguments)


def run_in_namespaces(arguments: list[str]) -> None:
    """Run `PID PROGRAM ARGUMENTS`: a program of this file, in the namespaces of a process, as nsenter does."""
    process, program, *rest = arguments
    libc, folder = ctypes.CDLL(None, use_errno=True), Path.cwd()
    for kind in ("user", "net", "uts", "mnt"):
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"entering the {kind} namespace of {process}")
    os.chdir(folder)  # a mount namespace begins in its root
    PROGRAMS[program](rest)


def run_code(arguments: list[str]) -> None:
    """Run `python -c CODE ARGUMENTS`."""
    sys.argv = ["-c", *arguments[1:]]
    exec(compile(arguments[0], "<code>", "exec"), {"__name__": "__main__"})


def run_worker(arguments: list[str]) -> None:
    """Run a worker of pytest-xdist, as `python -c CODE` does with the code of execnet, which it reads from stdin."""
    random.seed()  # not the numbers of the other workers: ports are drawn from them
    sys.argv = ["-c"]
    exec(compile(arguments[0], "<execnet>", "exec"), {"__name__": "__main__"})


def script_of_swift(name: str) -> str:
    """Return the path of a command's script in ms-swift."""
    package = importlib.util.find_spec("swift")
    assert package is not None and package.submodule_search_locations is not None
    return str(Path(package.submodule_search_locations[0], "cli", name))


def run_server(arguments: list[str]) -> None:
    """Run `python -m tests.forking.server KIND SOCKET OWNER`, in a fork of the first kind."""
    from tests.forking.server import main

    kind, path, owner = arguments
    main(kind, path, int(owner))


PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "megatron rlhf": run_megatron_rlhf,
    "swift rollout": run_swift_rollout,
    "vllm serve": run_vllm_serve,
    "tasks": run_tasks,
    "script": run_script,
    "python": run_python,
    "torchrun": run_torchrun,
    "in namespaces": run_in_namespaces,
    "code": run_code,
    "worker": run_worker,
    "server": run_server,
}

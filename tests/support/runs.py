"""Run the real command line, or forks of it, for the end-to-end tests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import IO, Any

import torch
from safetensors import safe_open

from swift_megatron_grpo import SWITCH
from swift_megatron_grpo.cli.check_layouts.layouts import takes_images, template_for_images
from tests.forking.client import ForkedProcess, fork_server, run_script
from tests.paths import PROGRAMS, REPOSITORY

REWARDS = REPOSITORY / "templates" / "plugins" / "letters.py"
PLUGINS = PROGRAMS / "e2e"
PROBE = PLUGINS / "probe.py"
# Completions of seeded random numbers, for tests of what is not generation: vLLM's start takes most of a short run.
# Further plugins may follow.
CANNED = ["--sync_check", "off", "--reward_funcs", "every_second", "--external_plugins", str(REWARDS),
          str(PLUGINS / "canned_completions.py"), str(PLUGINS / "uniform_groups.py")]  # fmt: skip
# Fused attention on a GPU needs heads of 64 or 128.
SIZE_FOR_GPUS = ["--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]

# These save seconds of every run that test nothing: filling a cache of 1 GiB with zeros, and Python's shutdown.
# Neither is used on a GPU, whose tests are about memory. One run of the command (test_cli.py) ends as a user's does.
ON_CPU = not torch.cuda.is_available()
_SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 2**26} if ON_CPU else {}
SMALL_CACHE = ["--vllm_engine_kwargs", json.dumps(_SMALL)] if ON_CPU else []
REPORTS_EXPERTS = ["--vllm_engine_kwargs", json.dumps({"enable_return_routed_experts": True, **_SMALL})]
QUICK_END = PROGRAMS / "e2e" / "quick_end"


def environment_of_processes() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(QUICK_END) if ON_CPU else None, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "PYTHONPATH": paths}


def make_model(folder: Path, kind: str = "dense", extra: Sequence[str] = ()) -> Path:
    """Make a tiny Qwen3 (dense, moe) or DeepSeek-V3, or a model of another type, named as in config.json."""
    script = "make_tiny_model.py" if kind in ("dense", "moe", "deepseek") else "make_tiny_composite.py"
    run_script(REPOSITORY / "scripts" / script, "--out", folder, "--kind", kind, *extra)
    return folder


def template_of(model: Path) -> str:
    """Return ms-swift's template: that of the dense Qwen3, or of the dense model of a type with an image part."""
    config = json.loads((model / "config.json").read_text())
    return template_for_images(config["model_type"]) if takes_images(config) else "qwen3"


def first_weights(model: Path) -> list[float]:
    """Return a few weights, to verify that two machines generated the same model."""
    with safe_open(model / "model.safetensors", "pt") as file:
        weights: list[float] = file.get_tensor("model.embed_tokens.weight")[0, :4].tolist()
    return weights


def make_dataset(path: Path, rows: int = 32) -> Path:
    script = REPOSITORY / "scripts" / "make_dataset.py"
    subprocess.run([sys.executable, str(script), "--out", str(path), "--rows", str(rows), "--seed", "0"], check=True)
    return path


def read_json_lines(path: Path) -> list[Any]:
    """Read a file of one JSON value per line. Completions may contain characters at which str.splitlines splits."""
    with path.open() as file:
        return [json.loads(line) for line in file]


@dataclass(frozen=True)
class Finished:
    code: int
    output: str
    folder: Path  # --output_dir

    @property
    def log(self) -> list[dict[str, Any]]:
        """The logged steps."""
        return [line for line in read_json_lines(self.folder / "logging.jsonl") if "loss" in line]

    @property
    def last_checkpoint(self) -> Path:
        return max(self.folder.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name.split("-")[1]))


def grpo_flags(
    model: Path, dataset: Path, folder: Path, flags: Sequence[str] = (), rewards: bool = True, plugin: bool = True
) -> list[str]:
    """Return the flags of a small run; `flags` come last and override them. Without `plugin`, ms-swift parses them."""
    own = ["--rollout_logprobs_interval", "1"] if plugin else []
    graded = ["--external_plugins", str(REWARDS), "--reward_funcs", "letters"] if rewards else []
    model_type = json.loads((model / "config.json").read_text())["model_type"]
    return ["--rlhf_type", "grpo", "--model", str(model), "--model_type", model_type, "--template", template_of(model),
            "--dataset", str(dataset), "--output_dir", str(folder),
            "--add_version", "false", "--check_model", "false", *graded,
            "--vllm_mode", "colocate", "--vllm_max_model_len", "256", "--vllm_enforce_eager", "true",
            "--vllm_gpu_memory_utilization", "0.3", "--num_generations", "4", "--micro_batch_size", "2",
            "--global_batch_size", "8", "--max_length", "128", "--max_completion_length", "24",
            "--train_iters", "2", "--lr", "1e-3", "--beta", "0", "--save_steps", "2", "--logging_steps", "1",
            "--no_save_optim", "true", "--no_save_rng", "true", "--dataloader_num_workers", "0",
            "--dataset_num_proc", "1", "--load_from_cache_file", "false", "--torch_dtype", "bfloat16",
            "--recompute_granularity", "none", "--temperature", "1.0",
            "--report_to", "none", *SMALL_CACHE, *own, *flags]  # fmt: skip


def values_of(arguments: Sequence[str]) -> dict[str, str | list[str]]:
    """Return the value of each flag, the last one if it is repeated."""
    values: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            current = values[argument.removeprefix("--")] = []
        else:
            current.append(argument)
    return {name: value[0] if len(value) == 1 else value for name, value in values.items()}


def megatron_rlhf(
    model: Path,
    dataset: Path,
    folder: Path,
    ranks: int,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout: int = 600,
    on_line: Callable[[str], object] | None = None,
    plugin: bool = True,
    rewards: bool = True,
    kills_ranks: bool = False,
) -> Finished:
    """Run `megatron rlhf --rlhf_type grpo` on forked ranks; on a GPU, the real command.

    A forked rank has imported everything already and runs what torchrun would start. Entry point, torchrun and process
    shutdown are not covered: for these, use `megatron_command`. Without `plugin`, a rank is as if the entry point had
    activated the CPU platform only. With `kills_ranks` the first rank that fails ends the others as under torchrun.
    """
    if not plugin:
        environment = {**(environment or {}), SWITCH: "platform"}
    if not ON_CPU:
        return megatron_command(model, dataset, folder, ranks, flags, environment, timeout=timeout, on_line=on_line)
    arguments = grpo_flags(model, dataset, folder, flags, rewards, plugin)
    kind = "trainer" if plugin else "upstream"
    return forked_ranks(arguments, folder, ranks, environment or {}, timeout, on_line, kind, kills_ranks)


def forked_ranks(
    arguments: Sequence[str],
    folder: Path,
    ranks: int,
    environment: Mapping[str, str],
    timeout: int = 600,
    on_line: Callable[[str], object] | None = None,
    kind: str = "trainer",
    kills_ranks: bool = False,
) -> Finished:
    """Run `megatron rlhf ARGUMENTS` on forked ranks."""

    def start(output: IO[str]) -> ForkedProcess:
        return fork_server(kind).start(
            "megatron rlhf", arguments, ranks, folder.parent, output, environment, kills_ranks
        )

    return _follow(start, folder, timeout, on_line)


def megatron_command(
    model: Path,
    dataset: Path,
    folder: Path,
    ranks: int,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
    timeout: int = 600,
    on_line: Callable[[str], object] | None = None,
) -> Finished:
    """Run the real command line: entry point, argument parsing, torchrun, and the shutdown of every process.

    With a `config` the flags are written to this YAML file, and `swift megatron` runs it.
    """
    command = ["megatron"] if config is None else ["swift", "megatron"]
    arguments = grpo_flags(model, dataset, folder, flags)
    if config is not None:
        config.write_text(json.dumps(values_of(arguments)))  # JSON is YAML
        arguments = [str(config)]
    variables = {"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(random.randint(20000, 32000)), **(environment or {})}
    return command_line([*command, "rlhf", *arguments], folder, variables, timeout, on_line)


def command_line(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout: int = 600,
    on_line: Callable[[str], object] | None = None,
) -> Finished:
    """Run `megatron ...` or `swift megatron ...` beside the output folder of the run."""
    script = Path(sys.executable).with_name(command[0])
    # packages in a separate folder have no scripts next to the interpreter
    program = (
        [str(script), *command[1:]]
        if script.exists()
        else [sys.executable, "-P", "-m", "swift.cli._megatron.main", *command[command.index("rlhf") :]]
    )
    variables = {**environment_of_processes(), **environment}

    def start(output: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(program, env=variables, text=True, cwd=folder.parent, stdout=output,
                                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    return _follow(start, folder, timeout, on_line)


def _follow(
    start: Callable[[IO[str]], ForkedProcess | subprocess.Popen[str]],
    folder: Path,
    timeout: float,
    on_line: Callable[[str], object] | None,
) -> Finished:
    """Pass every line that a process prints to `on_line`; kill its process group after the timeout."""
    reading, writing = os.pipe()
    with open(writing, "w") as output:
        process = start(output)
    killer = Timer(timeout, lambda: os.killpg(process.pid, signal.SIGKILL))
    killer.start()
    lines = []
    with open(reading, errors="replace") as printed:
        for line in printed:
            lines.append(line)
            if on_line is not None:
                on_line(line)
    killer.cancel()
    text = "".join(lines)
    folder.with_suffix(".txt").write_text(text)
    return Finished(process.wait(), text, folder)


def hf_difference(checkpoint: Path, base: Path | None = None) -> dict[str, float]:
    printed = run_script(PROGRAMS / "e2e" / "hf_logprobs.py", checkpoint, *([base] if base else []))
    difference: dict[str, float] = json.loads(printed.splitlines()[-1])
    return difference

"""Try a script for a cluster on this machine, before paying for GPUs:

    python -m swift_megatron_grpo.cli.check_script run.sh [--ranks 2] [--steps 1]

The script's command is read, not run. First all of its flags are checked at its own sizes, as its ranks would. Then it
runs on a tiny random model of the same architecture, with made-up rows in place of a hub's data, on a few ranks.

Without a folder of the model on this machine, sizes are checked against those of a made-up large model, which every
common layout divides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.utils import find_free_port

from swift_megatron_grpo.cli.script_stand_ins import (
    Flags,
    NoStandIn,
    architecture_of,
    differences,
    read_flags,
    reduce,
    replace_inputs,
    typed,
)
from swift_megatron_grpo.cli.shell_scripts import Launch, launches

_SERVER_FLAGS = (  # of `swift rollout`, that a script's server keeps
    "multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "enable_thinking", "template", "system",
    "vllm_enable_lora", "vllm_max_lora_rank",
)  # fmt: skip
_CACHE = json.dumps({"kv_cache_memory_bytes": 2**26})
_SECONDS_TO_START = 300


@dataclass(frozen=True)
class Plan:
    """The runs in place of one command of a script."""

    world_size: int  # of the script
    published: Flags  # at the script's own sizes
    ranks: int
    reduced: Flags
    server: Flags | None  # of a rollout server, if the script uses one
    replaced: list[str]  # one line for each input that was replaced


def make_plan(script: str, folder: Path, ranks: int, steps: int, environment: Mapping[str, str]) -> Plan:
    """Read the script and write its stand-ins to the folder. Raises NoStandIn if something has none."""
    from swift_megatron_grpo.cli.stand_in_models import save_large_config, save_tiny_model

    found = launches(script, environment)
    runs = [launch for launch in found if launch.kind == "rlhf" and _is_grpo(launch)]
    if not runs:
        raise NoStandIn(
            "the script has no `megatron rlhf --rlhf_type grpo`; only such commands are checked. If it calls another "
            "script, run it with `--check true` instead"
        )
    flags = read_flags(runs[0].arguments)
    if flags.get("vllm_server_base_url") == []:  # the script splits a variable; the run has a server of its own
        flags["vllm_server_base_url"] = ["http://127.0.0.1:8000"]
    architecture = architecture_of(flags)
    rollouts = [read_flags(launch.arguments) for launch in found if launch.kind == "rollout"]
    environments = [name for given in (flags, *rollouts) for name in given.get("gym_env", [])]
    published, replaced = replace_inputs(flags, folder, environments)
    names = {"model_type": [architecture.model_type]}
    if "template" not in flags and architecture.template is not None:
        names["template"] = [architecture.template]
    local = (Path(flags["model"][0]).expanduser() / "config.json").is_file()
    if not local:
        large = save_large_config(folder / "large", architecture.hf_type, architecture.class_name)
        published |= {"model": [str(large)]}
        replaced.append(f"--model {flags['model'][0]}: a random model of type {architecture.hf_type}")
    published |= names | {"output_dir": [str(folder / "output")]}
    tiny = save_tiny_model(folder / "model", architecture.hf_type)
    reduced = reduce(published, ranks, steps) | {"model": [str(tiny)]} | _on_cpu(published)
    server = None
    if flags.get("vllm_mode") == ["server"]:
        server = _server(rollouts[0] if rollouts else {}, reduced)
        for name in ("vllm_server_host", "vllm_server_port"):
            reduced.pop(name, None)
    return Plan(_world_size(runs[0]), published, ranks, reduced, server, replaced)


def _is_grpo(launch: Launch) -> bool:
    return read_flags(launch.arguments).get("rlhf_type") == ["grpo"]


def _world_size(launch: Launch) -> int:
    return math.prod(_count(launch, name) for name in ("NPROC_PER_NODE", "NNODES"))


def _count(launch: Launch, name: str) -> int:
    value = launch.environment.get(name, "1")
    if not value.isdigit():
        raise NoStandIn(f"the script computes {name}, which is not done here; set it: {name}=8 python -m ...")
    return int(value)


def _on_cpu(flags: Flags) -> Flags:
    """Return a small cache for vLLM, which would fill one of gigabytes with zeros, and no FP8, which needs a GPU."""
    import torch

    if torch.cuda.is_available():
        return {}
    given: dict[str, Any] = json.loads("".join(flags.get("vllm_engine_kwargs", [])) or "{}")
    none = {"rollout_quantization": ["none"]} if "rollout_quantization" in flags else {}
    return {"vllm_engine_kwargs": [json.dumps(given | json.loads(_CACHE))], **none}


def _server(given: Flags, trainer: Flags) -> Flags:
    kept = {name: given[name] for name in _SERVER_FLAGS if name in given}
    shared = {
        name: trainer[name] for name in ("model", "model_type", "template", "external_plugins") if name in trainer
    }
    length = int(trainer.get("max_length", ["256"])[0]) + int(trainer["max_completion_length"][0])
    sizes = {"vllm_max_model_len": [str(length)], "vllm_enforce_eager": ["true"], "torch_dtype": ["bfloat16"]}
    return kept | shared | sizes | _on_cpu({})


def check_flags(flags: Flags, world_size: int) -> None:
    """Check the flags as the script's ranks would, up to the point where they create process groups."""
    from swift_megatron_grpo.cli.check.arguments import parse_flags

    for name, value in {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": 0, "LOCAL_RANK": 0}.items():
        os.environ[name] = str(value)
    parse_flags(typed(flags))


# ---- the command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="shell script with a `megatron rlhf --rlhf_type grpo`")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the run; 0: as many as the script has")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of the run; 0: check the flags only")
    parser.add_argument("--keep", type=Path, help="folder for model, rows and output; default: a temporary one")
    options = parser.parse_args(arguments)

    from swift_megatron_grpo.plugin.activation import hook_platform

    hook_platform()
    keep = options.keep
    with tempfile.TemporaryDirectory(prefix="check-script-") if keep is None else nullcontext(str(keep)) as path:
        folder = Path(path).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            script, environment = options.script.read_text(), dict(os.environ)
            plan = make_plan(script, folder, options.ranks or 2, max(options.steps, 1), environment)
            if options.ranks == 0:
                plan = make_plan(script, folder, plan.world_size, max(options.steps, 1), environment)
            _print("in place of what is not on this machine", plan.replaced)
            check_flags(plan.published, plan.world_size)
        except ValueError as error:
            raise SystemExit(f"check_script: {options.script} would be refused:\n{error}") from error
        print(f"check_script: all flags are accepted on {plan.world_size} ranks")
        if options.steps:
            _print(f"smaller, for {plan.ranks} ranks of this machine", differences(plan.published, plan.reduced))
            _run(plan, folder)


def _print(heading: str, lines: Sequence[str]) -> None:
    print("\n    ".join([f"check_script: {heading}:", *lines]) if lines else f"check_script: {heading}: nothing")


def _run(plan: Plan, folder: Path) -> None:
    environment = {**os.environ, "NPROC_PER_NODE": str(plan.ranks), "MASTER_PORT": str(find_free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NNODES", "NODE_RANK"):
        environment.pop(name, None)  # check_flags has set some
    with ExitStack() as stack:
        address: Flags = {}
        if plan.server is not None:
            address = stack.enter_context(_running_server(plan.server, folder, environment))
        command = [sys.executable, "-P", "-m", "swift.cli._megatron.main", "rlhf", *typed(plan.reduced | address)]
        code = subprocess.run(command, env=environment, cwd=folder).returncode
    log = folder / "output" / "logging.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    for step in steps:
        if "loss" in step:
            print(f"check_script: loss {step['loss']:.6f}, grad_norm {step['grad_norm']:.6f}, reward {step['reward']}")
    if code:
        raise SystemExit(f"check_script: the run ended with exit code {code}")
    print(f"check_script: the script runs, on {plan.ranks} ranks and a tiny model")


@contextmanager
def _running_server(flags: Flags, folder: Path, environment: Mapping[str, str]) -> Iterator[Flags]:
    """Start the rollout server of a script and yield the trainer's flags with its address."""
    port = find_free_port()
    command = [sys.executable, "-m", "swift_megatron_grpo.generation.server", *typed(flags | {"port": [str(port)]})]
    with (folder / "rollout.log").open("w") as log:
        server = subprocess.Popen(command, env=dict(environment), cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                                  start_new_session=True)  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, server, folder / "rollout.log")
        yield {"vllm_server_base_url": [url]}
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health/", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise SystemExit(f"check_script: the rollout server did not start:\n{log.read_text()[-4000:]}")


if __name__ == "__main__":
    main()

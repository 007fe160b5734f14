"""The tiny run that is trained in place of a script's, with a rollout server if the script has one."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.check_script.shell import Launch, launches
from swift_megatron_grpo.cli.check_script.stand_ins import (
    Flags,
    NoStandIn,
    agent_of,
    architecture_of,
    reduce,
    replace_inputs,
)
from swift_megatron_grpo.cli.command_line import Refused
from swift_megatron_grpo.cli.doctor.command import free_port
from swift_megatron_grpo.launch.roles import read_flags, words_of

_SERVER_FLAGS = (  # of `swift rollout`, that a script's server keeps
    "multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "enable_thinking", "template", "system",
    "vllm_enable_lora", "vllm_max_lora_rank", "rollout_quantization", "vllm_engine_kwargs",
)  # fmt: skip
_SHARED_FLAGS = ("model", "model_type", "template", "external_plugins")  # of both
_SECONDS_TO_START = 300
_CACHE = {"kv_cache_memory_bytes": 2**26}
_REPORTS_EXPERTS = {"enable_return_routed_experts": True}  # of vLLM, for --router_replay_mode R3


@dataclass(frozen=True)
class Rehearsal:
    """The runs in place of one command of a script."""

    world_size: int  # of the script
    published: Flags  # at the script's own sizes
    ranks: int
    reduced: Flags
    server: Flags | None  # of a rollout server, if the script uses one
    replaced: list[str]  # one line for each input that was replaced


def make_rehearsal(script: str, folder: Path, ranks: int, steps: int, environment: Mapping[str, str]) -> Rehearsal:
    """Read the script and write its stand-ins to the folder. Raises NoStandIn if something has none."""
    from swift_megatron_grpo.cli.tiny_models import save_large_config, save_tiny_model

    found = launches(script, environment)
    runs = [(launch, read_flags(launch.arguments)) for launch in found if launch.kind == "rlhf"]
    runs = [(launch, flags) for launch, flags in runs if flags.get("rlhf_type") == ["grpo"]]
    if not runs:
        raise NoStandIn(
            "the script has no `megatron rlhf --rlhf_type grpo`; only such commands are checked. If it calls another "
            "script, run it with `--check true` instead"
        )
    run, flags = runs[0]
    if flags.get("vllm_server_base_url") == []:  # the script splits a variable; the run has a server of its own
        flags["vllm_server_base_url"] = ["http://127.0.0.1:8000"]
    rollouts = [read_flags(launch.arguments) for launch in found if launch.kind == "rollout"]
    published, replaced = replace_inputs(flags, folder, rollouts)
    architecture = architecture_of(flags)  # after plugins that register it
    published |= {"model_type": [architecture.model_type], "output_dir": [str(folder / "output")]}
    if "template" not in published and architecture.template is not None:
        published["template"] = [architecture.template]
    if not (Path(flags["model"][0]).expanduser() / "config.json").is_file():
        large = save_large_config(folder / "large", architecture.hf_type, architecture.class_name)
        published["model"] = [str(large)]
        replaced.append(f"--model {flags['model'][0]}: a random model of type {architecture.hf_type}")
    tiny = save_tiny_model(folder / "model", architecture.hf_type)
    reduced = reduce(published, ranks, steps) | {"model": [str(tiny)]} | _on_cpu(published)
    if "teacher_model" in flags:
        replaced += _replace_teacher(flags, folder, published, reduced)
    server = None
    if flags.get("vllm_mode") == ["server"]:
        given = rollouts[0] if rollouts else _of_server(published)  # another script may start the server
        server = _server(given, reduced)
        for name in ("vllm_server_host", "vllm_server_port"):
            reduced.pop(name, None)
    return Rehearsal(_count(run, "NPROC_PER_NODE") * _count(run, "NNODES"), published, ranks, reduced, server, replaced)


def _replace_teacher(flags: Flags, folder: Path, published: Flags, reduced: Flags) -> list[str]:
    """Set the teachers of both runs; that of a run which teaches itself is its model. Return what was replaced."""
    from swift_megatron_grpo.cli.tiny_models import save_large_config, save_tiny_model

    [name] = flags["teacher_model"]
    if [name] == flags["model"]:
        published["teacher_model"], reduced["teacher_model"] = published["model"], reduced["model"]
        return []
    teacher = architecture_of({"model": [name], "model_type": flags.get("teacher_model_type", [])})
    published["teacher_model_type"] = reduced["teacher_model_type"] = [teacher.model_type]
    reduced["teacher_model"] = [str(save_tiny_model(folder / "teacher", teacher.hf_type))]
    if (Path(name).expanduser() / "config.json").is_file():
        return []
    published["teacher_model"] = [str(save_large_config(folder / "large_teacher", teacher.hf_type, teacher.class_name))]
    return [f"--teacher_model {name}: a random model of type {teacher.hf_type}"]


def _count(launch: Launch, name: str) -> int:
    value = launch.environment.get(name, "1")
    if not value.isdigit():
        raise NoStandIn(
            f"the script computes {name}, which is not done here; set it: {name}=8 swift-megatron-grpo check-script ..."
        )
    return int(value)


def _on_cpu(flags: Flags) -> Flags:
    """Return a small cache for vLLM, which would fill one of gigabytes with zeros, and no FP8, which needs a GPU."""
    import torch

    if torch.cuda.is_available():
        return {}
    given: dict[str, Any] = json.loads("".join(flags.get("vllm_engine_kwargs", [])) or "{}")
    none = {"rollout_quantization": ["none"]} if "rollout_quantization" in flags else {}
    return {"vllm_engine_kwargs": [json.dumps(given | _CACHE)], **none}


def _of_server(trainer: Flags) -> Flags:
    """Return the flags of a server that fits the trainer's."""
    if trainer.get("router_replay_mode") != ["R3"]:
        return trainer
    settings: dict[str, Any] = json.loads("".join(trainer.get("vllm_engine_kwargs", [])) or "{}")
    return trainer | {"vllm_engine_kwargs": [json.dumps(settings | _REPORTS_EXPERTS)]}


def _server(given: Flags, trainer: Flags) -> Flags:
    kept = {name: given[name] for name in _SERVER_FLAGS if name in given}
    shared = {name: trainer[name] for name in _SHARED_FLAGS if name in trainer}
    length = int(trainer.get("max_length", ["256"])[0]) + int(trainer["max_completion_length"][0])
    sizes = {"vllm_max_model_len": [str(length)], "vllm_enforce_eager": ["true"], "torch_dtype": ["bfloat16"]}
    return kept | agent_of(given) | shared | sizes | _on_cpu(kept)


def train(rehearsal: Rehearsal, folder: Path) -> None:
    """Run the rehearsal and print the losses of its steps. Raises Refused if it fails."""
    environment = {**os.environ, "NPROC_PER_NODE": str(rehearsal.ranks), "MASTER_PORT": str(free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1"}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NNODES", "NODE_RANK"):
        environment.pop(name, None)  # the check of the flags has set some
    with ExitStack() as stack:
        address: Flags = {}
        if rehearsal.server is not None:
            address = stack.enter_context(_running_server(rehearsal.server, folder, environment))
        command = [
            sys.executable,
            "-P",
            "-m",
            "swift.cli._megatron.main",
            "rlhf",
            *words_of(rehearsal.reduced | address),
        ]
        code = subprocess.run(command, env=environment, cwd=folder).returncode
    log = folder / "output" / "logging.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    for step in steps:
        if "loss" in step:
            print(f"check-script: loss {step['loss']:.6f}, grad_norm {step['grad_norm']:.6f}, reward {step['reward']}")
    if code:
        raise Refused(f"the run ended with exit code {code}")


@contextmanager
def _running_server(flags: Flags, folder: Path, environment: Mapping[str, str]) -> Iterator[Flags]:
    """Start the rollout server of a script and yield the trainer's flags with its address."""
    port = free_port()
    command = [sys.executable, "-m", "swift_megatron_grpo.generation.server", *words_of(flags | {"port": [str(port)]})]
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
    raise Refused(f"the rollout server did not start:\n{log.read_text()[-4000:]}")

"""Flags in commands of the pages exist, and the scripts of docs/multi_node.md run, with stand-ins for Slurm."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from swift.cli.main import get_torchrun_args

from swift_megatron_grpo.arguments.command_line import known_flags
from swift_megatron_grpo.cli.main import COMMANDS, PROGRAM, parser_of
from swift_megatron_grpo.generation.server.arguments import GRPORolloutArguments
from swift_megatron_grpo.launch.on_machines import Site, site_of
from swift_megatron_grpo.launch.roles import roles_of
from tests.paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
MULTI_NODE = REPOSITORY / "docs" / "multi_node.md"
OF_TORCHRUN = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
STARTS = {  # of commands, with their flags
    "swift rollout": {field.name for field in fields(GRPORolloutArguments)},
    "megatron rlhf": known_flags() | {"config"},  # a file with roles
    "run.sh": known_flags(),
}
OPTIONS = {name: {option.removeprefix("--") for option in parser_of(name)._option_string_actions} for name in COMMANDS}
# Each prints its name, torchrun's variables and its arguments; srun runs a command once for each task.
COMMAND = """#!/bin/bash
echo "$(basename "$0")|$NNODES|$NODE_RANK|$NPROC_PER_NODE|$MASTER_ADDR|$MASTER_PORT|$*"
"""
STAND_INS = {
    "megatron": COMMAND,
    "swift": COMMAND,
    "scontrol": "#!/bin/bash\nprintf 'gpu%s\\n' 1 2 3\n",
    "getent": "#!/bin/bash\n",
    "srun": """#!/bin/bash
tasks=$SLURM_NNODES
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && tasks=${1#*=}
    shift
done
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@"; done
""",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a manifest."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


def unknown_flags(script: str) -> Iterator[str]:
    """Yield the flags of `megatron rlhf`, of scripts that end with it, and of `swift rollout` that do not exist."""
    for line in re.sub(r"\\\n\s*", " ", script).splitlines():
        words = re.split(r"[\s'\"]+", line.split(" #")[0])
        for i, word in enumerate(words):
            name = re.fullmatch(r"--(\w+)(?:=.*)?", word)
            before = " ".join(words[:i])
            last = max(STARTS, key=before.rfind)
            tool = re.search(rf"{PROGRAM} ([a-z-]+)", before)
            known = OPTIONS[tool[1]] if tool else STARTS[last]
            if name and (tool or last in before) and name[1] not in known:
                yield f"{tool[0] if tool else last} {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_a_command_exists(page: Path) -> None:
    scripts = blocks(page, "bash") + [text for block in blocks(page, "yaml") for text in manifest_texts(block)]
    assert [flag for script in scripts for flag in unknown_flags(script)] == []


def manifest_texts(block: str) -> list[str]:
    return [text for document in yaml.safe_load_all(block) for text in texts(document)]


def test_a_flag_that_does_not_exist_is_found() -> None:
    assert list(
        unknown_flags(
            "swift rollout --modle x --port 1 &\nx run.sh --stop_grace 1 \\\n  --port 2\n"
            f"{PROGRAM} check-script run.sh --steps 1"
        )
    ) == [
        "swift rollout --modle",
        "run.sh --port",
        f"{PROGRAM} check-script --steps",
    ]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run a script of the page, and return the commands that it starts."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run.sh").write_text('exec megatron rlhf "$@"\n')

    def run_script(script: str, **variables: str) -> list[list[str]]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        script = script.replace("/shared/run.sh", "run.sh").replace("kill %1", "wait")
        done = subprocess.run(["bash", "-uc", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return sorted(line.split("|") for line in done.stdout.splitlines())

    return run_script


def torchrun_flags(command: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what ms-swift gives to torchrun in the environment of the command."""
    for name, value in zip(OF_TORCHRUN, command[1:6], strict=True):
        monkeypatch.setenv(name, value)
    arguments = get_torchrun_args() or []
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def expected(rank: int, address: str, port: str) -> dict[str, str]:
    return {
        "--nnodes": "2", "--node_rank": str(rank), "--nproc_per_node": "8", "--master_addr": address,
        "--master_port": port,
    }  # fmt: skip


def test_machines_of_torchrun(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [block for block in blocks(MULTI_NODE, "bash") if block.startswith("export NNODES")]
    for rank in (0, 1):
        [command] = run(block.replace("NODE_RANK=0", f"NODE_RANK={rank}"), NODE_RANK="")
        assert torchrun_flags(command, monkeypatch) == expected(rank, "10.0.0.1", "29500")


def scripts_of_slurm(machines: int) -> list[str]:
    return [block for block in blocks(MULTI_NODE, "bash") if f"#SBATCH --nodes={machines}" in block]


@pytest.mark.parametrize("machines", [2, 3])
def test_tasks_of_slurm(run: Any, monkeypatch: pytest.MonkeyPatch, machines: int) -> None:
    [block] = [block for block in scripts_of_slurm(machines) if "run.sh" in block]
    variables = {"SLURM_NNODES": str(machines), "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "gpu[1-3]"}
    commands = run(block, NODE_RANK="", NNODES="", NPROC_PER_NODE="", MASTER_ADDR="", MASTER_PORT="", **variables)
    trainers = [command for command in commands if command[0] == "megatron"]
    for rank, command in enumerate(trainers):
        assert torchrun_flags(command, monkeypatch) == expected(rank, "gpu1", "22345")
    assert len(trainers) == 2 and len(commands) == machines
    if machines == 3:
        assert "--vllm_server_base_url http://gpu3:8000 " in trainers[0][-1]
        assert commands[-1][0] == "swift" and "--host 0.0.0.0 --port 8000" in commands[-1][-1]


def containers(kind: str) -> dict[str, Any]:
    documents = [document for block in blocks(MULTI_NODE, "yaml") for document in yaml.safe_load_all(block)]
    documents = [document for document in documents if "kind" in document]
    [manifest] = [document for document in documents if document["kind"] == kind]
    [service] = [
        document
        for document in documents
        if document["kind"] == "Service" and document["metadata"]["name"] == manifest["metadata"]["name"]
    ]
    pod = manifest["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    return {**container, "variables": {item["name"]: item["value"] for item in container.get("env", [])}}


def test_pods_of_kubernetes(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server = containers("Job"), containers("StatefulSet")
    for rank in (0, 1):
        [command] = run(trainer["args"][0], JOB_COMPLETION_INDEX=str(rank), **trainer["variables"])
        assert torchrun_flags(command, monkeypatch) == expected(rank, "grpo-0.grpo", "29500")
        assert shlex.split(command[-1])[-2:] == [f"http://rollout-{i}.rollout:8000" for i in (0, 1)]
    variables = dict.fromkeys(OF_TORCHRUN, "") | server["variables"]
    [command] = run(server["args"][0], **variables)
    assert command[0] == "swift" and "--port 8000" in command[-1]


def test_roles_on_machines_of_slurm(run: Any) -> None:
    [block] = [block for block in scripts_of_slurm(3) if "run.sh" not in block]
    variables = {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu[1-3]", **dict.fromkeys(OF_TORCHRUN, "")}
    commands = run(block, **variables)
    assert commands == [["megatron", "", "", "", "gpu1", "", "rlhf --config roles.yaml"]] * 3
    assert site_of({"SLURM_NNODES": "3", "SLURM_NODEID": "2", "MASTER_ADDR": "gpu1"}) == Site(2, 3, "gpu1", 29500)


def test_roles_of_one_file() -> None:
    [text] = [block for block in blocks(MULTI_NODE, "yaml") if block.startswith("rlhf_type")]
    roles = roles_of(yaml.safe_load(text), {}, {})
    assert (roles.ranks, roles.machines, roles.servers, roles.gpus_of_server) == (16, 2, 4, 2)
    for flags, known in ((roles.trainer_flags, STARTS["megatron rlhf"]), (roles.server_flags, STARTS["swift rollout"])):
        assert {word.removeprefix("--") for word in flags if word.startswith("--")} <= known

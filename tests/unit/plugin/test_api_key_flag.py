"""The key's flag never reaches the command that a script prints and starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.plugin.command_line import hide_api_key
from tests.forking.client import fork_server
from tests.paths import REPOSITORY

GRPO = ["rlhf", "--rlhf_type", "grpo"]
KEY = "k-3 9"
RUN_AS_ON_A_GPU = """
import sys
from swift_megatron_grpo.plugin import rank
from tests.forking.programs import run_python
rank.has_accelerator = lambda: True
run_python(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("argv", "remaining"),
    [
        (["/bin/swift", "rollout", "--api_key", KEY, "--port", "1"], ["rollout", "--port", "1"]),
        (["/bin/swift", "rollout", f"--api-key={KEY}"], ["rollout"]),
        (["/swift/cli/rollout.py", "--model", "a", "--api_key", "old", "--api_key", KEY], ["--model", "a"]),
        (["/bin/megatron", *GRPO, "--vllm_server_api_key", KEY], GRPO),
        (["/bin/swift", "megatron", *GRPO, f"--vllm_server_api_key={KEY}"], ["megatron", *GRPO]),
    ],
)
def test_the_key_moves_to_the_environment(argv: list[str], remaining: list[str]) -> None:
    environ: dict[str, str] = {}
    hide_api_key(argv, environ)
    assert argv[1:] == remaining and environ == {API_KEY_VARIABLE: KEY}


@pytest.mark.parametrize(
    "argv",
    [
        ["/bin/swift", "deploy", "--api_key", KEY],  # has no such variable
        ["/bin/megatron", "rlhf", "--rlhf_type", "gkd", "--vllm_server_api_key", KEY],
        ["/bin/swift", "rollout", "--api_key"],
        ["/bin/megatron", *GRPO],
    ],
)
def test_other_commands_keep_their_arguments(argv: list[str]) -> None:
    environ: dict[str, str] = {}
    before = list(argv)
    hide_api_key(argv, environ)
    assert environ == {} and argv == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("in_file", [False, True])
def test_the_line_that_the_launcher_prints_has_no_key(tmp_path: Path, in_file: bool) -> None:
    script = Path(sys.executable).with_name("megatron")
    config = tmp_path / "run.yaml"
    config.write_text(f"rlhf_type: grpo\nvllm_server_api_key: {KEY}\nmodel: none\n")
    flags = [str(config)] if in_file else ["--rlhf_type", "grpo", "--vllm_server_api_key", KEY, "--model", "none"]
    process = subprocess.Popen([sys.executable, str(script), "rlhf", *flags], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("run sh:"))
        assert KEY not in line and "--model none" in line
        assert ("--vllm_server_api_key ***" in line) == in_file
        if not in_file:
            assert KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("in_environment", [False, True])
def test_a_key_in_a_yaml_file_stays_in_command_lines(tmp_path: Path, in_environment: bool) -> None:
    """In the file's section `env` it does not, as docs/security.md advises.

    Ranks are processes, as on a GPU, and no forks, which have no command line of their own.
    """
    config = tmp_path / "run.yaml"
    key = f"ENV:\n  SWIFT_ROLLOUT_API_KEY: {KEY}\n" if in_environment else f"vllm_server_api_key: {KEY}\n"
    config.write_text(f"rlhf_type: grpo\nmodel: none\n{key}")
    command = [str(Path(sys.executable).with_name("megatron")), "rlhf", str(config)]
    with open(os.devnull, "w") as output:
        arguments = [RUN_AS_ON_A_GPU, *command]
        process = fork_server("torch").start("code", arguments, 0, REPOSITORY, output, {"NPROC_PER_NODE": "1"})
    try:
        ranks: list[list[str]] = []
        deadline = time.monotonic() + 300
        while not ranks and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            with suppress(psutil.NoSuchProcess):
                commands = [child.cmdline() for child in psutil.Process(process.pid).children(recursive=True)]
                ranks = [command for command in commands if any(part.endswith("rlhf.py") for part in command)]
        assert (KEY in ranks[0]) != in_environment
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

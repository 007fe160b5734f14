"""The installed plugin changes `megatron rlhf --rlhf_type grpo` and `swift megatron ...`, and nothing else.

Every other command prints exactly the same with the plugin on and off.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo import SWITCH
from tests.forking.client import free_port

pytestmark = pytest.mark.e2e


def start(mode: str, *command: str, **environ: str) -> subprocess.Popen[str]:
    script = Path(sys.executable).with_name(command[0])
    fixed = {"HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "PYTHONHASHSEED": "0"}  # help texts print sets
    variables = {**os.environ, **fixed, **environ, SWITCH: mode}
    return subprocess.Popen(
        [str(script), *command[1:]], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def run(mode: str, *command: str, **environ: str) -> tuple[int, str]:
    return finish(start(mode, *command, **environ))


def without_numbers(output: str) -> list[str]:
    """Return the sorted lines without numbers: times, process ids and the order of two processes' lines vary by run."""
    return sorted(re.sub(r"\d+", "#", line) for line in output.splitlines())


def compare(with_the_plugin: str, without: str) -> None:
    """Run one command with the plugin on and one with it off; they must exit and print the same."""
    started = [start("on", *with_the_plugin.split()), start("off", *without.split())]
    on, off = (finish(process) for process in started)
    assert on[0] == off[0]
    assert without_numbers(on[1]) == without_numbers(off[1])
    assert len(on[1].splitlines()) > 3  # it did print something
    assert "swift_megatron_grpo" not in on[1]


# Each start costs 17 CPU seconds of imports. By default, the two commands that are most like
# `megatron rlhf --rlhf_type grpo` are run; tests/unit/plugin/test_autoload.py classifies all command lines.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("swift sft --help", marks=pytest.mark.slow),
        "swift rlhf --rlhf_type grpo --help",
        pytest.param("megatron sft --model /no/such/model", marks=pytest.mark.slow),
        pytest.param("megatron pt --model /no/such/model", marks=pytest.mark.slow),
        pytest.param("megatron export --model /no/such/model", marks=pytest.mark.slow),
    ],
)
def test_other_commands_print_the_same_with_and_without_the_plugin(command: str) -> None:
    compare(command, command)


def test_another_type_of_rlhf_prints_the_same_also_as_swift_megatron() -> None:
    """`swift megatron` works for every command, not only for GRPO: ms-swift's `swift` script has no such command."""
    command = "megatron rlhf --rlhf_type dpo --model /no/such/model"
    compare(f"swift {command}", command)
    _, off = run("off", "swift", *command.split())
    assert "KeyError: 'megatron'" in off


def test_swift_megatron_parses_a_config_file_with_our_flags_in_all_ranks(tmp_path: Path) -> None:
    """The command reaches torchrun and its ranks, on the CPU platform if needed, and they use our argument class."""
    config = tmp_path / "grpo.yaml"
    config.write_text("rlhf_type: grpo\n")
    ranks = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    code, output = run("on", "swift", "megatron", "rlhf", str(config), **ranks)
    assert code != 0
    assert re.search(r"run sh: `.*/rlhf\.py --rlhf_type grpo`", output)
    assert output.count("ValueError: no model is set; use --model") == 2


def test_an_invalid_value_of_the_switch_is_explained() -> None:
    code, output = run("yes", "megatron", "rlhf", "--rlhf_type", "grpo")
    assert code == 1
    assert "SWIFT_MEGATRON_GRPO='yes' is none of its values (on: " in output

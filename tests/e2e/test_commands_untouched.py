"""The installed plugin changes `megatron rlhf --rlhf_type grpo` and `swift megatron ...`, and nothing else.

Every other command prints exactly the same with the plugin on and off. test_cli.py runs `swift megatron`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo import SWITCH
from tests.forking.client import run_python
from tests.forking.programs import script_of_swift

pytestmark = pytest.mark.e2e


def script_of(command: str) -> str:
    return str(Path(sys.executable).with_name(command))


def start(mode: str, *command: str) -> subprocess.Popen[str]:
    fixed = {"HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "PYTHONHASHSEED": "0"}  # help texts print sets
    variables = {**os.environ, **fixed, SWITCH: mode}
    return subprocess.Popen(
        [script_of(command[0]), *command[1:]],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def without_numbers(output: str) -> list[str]:
    """Return the sorted lines without numbers: times, process ids and the order of two processes' lines vary by run."""
    return sorted(re.sub(r"\d+", "#", line) for line in output.splitlines())


def run_both(with_the_plugin: str, without: str) -> tuple[tuple[int, str], tuple[int, str]]:
    """Run one command with the plugin on and one with it off, side by side."""
    started = [start("on", *with_the_plugin.split()), start("off", *without.split())]
    on, off = (finish(process) for process in started)
    return on, off


def what_matters(result: tuple[int, str]) -> tuple[int, list[str]]:
    """Return exit code and lines of a command, which must have printed something, and nothing of the plugin."""
    code, output = result
    assert len(output.splitlines()) > 3 and "swift_megatron_grpo" not in output
    return code, without_numbers(output)


# Each start costs 17 CPU seconds of imports. By default, the command that is most like `megatron rlhf --rlhf_type grpo`
# is run, in forks; tests/unit/plugin/test_autoload.py classifies all command lines.
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "swift sft --help",
        "swift rlhf --rlhf_type grpo --help",
        "megatron sft --model /no/such/model",
        "megatron pt --model /no/such/model",
        "megatron export --model /no/such/model",
    ],
)
def test_other_commands_print_the_same_with_and_without_the_plugin(command: str) -> None:
    on, off = run_both(command, command)
    assert what_matters(on) == what_matters(off)


def test_grpo_without_megatron_prints_the_same_with_and_without_the_plugin() -> None:
    """The process that `swift rlhf --rlhf_type grpo --help` starts."""
    script = script_of_swift("rlhf.py")
    on, off = (run_python(script, "--rlhf_type", "grpo", "--help", **{SWITCH: mode}) for mode in ("on", "off"))
    assert what_matters(on) == what_matters(off)
    assert "--num_generations" in on[1]


@pytest.mark.nightly
def test_another_type_of_rlhf_prints_the_same_also_as_swift_megatron() -> None:
    """`swift megatron` works for every command, not only for GRPO: ms-swift's `swift` script has no such command."""
    command = "megatron rlhf --rlhf_type dpo --model /no/such/model"
    on, off = run_both(f"swift {command}", command)
    assert what_matters(on) == what_matters(off)
    _, off = run_python(script_of("swift"), *command.split(), **{SWITCH: "off"})
    assert "KeyError: 'megatron'" in off


@pytest.mark.thorough
def test_an_invalid_value_of_the_switch_is_explained() -> None:
    """A fork is the `megatron` script, which starts a rank."""
    code, output = run_python(script_of("megatron"), "rlhf", "--rlhf_type", "grpo", **{SWITCH: "yes"})
    assert code == 1
    assert "SWIFT_MEGATRON_GRPO='yes' is none of its values (on: " in output

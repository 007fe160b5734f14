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


@pytest.mark.parametrize(
    "command",
    [
        "swift sft --help",
        "swift rlhf --rlhf_type grpo --help",
        "megatron sft --model /no/such/model",
        pytest.param("megatron pt --model /no/such/model", marks=pytest.mark.slow),
        pytest.param("megatron export --model /no/such/model", marks=pytest.mark.slow),
        "megatron rlhf --rlhf_type dpo --model /no/such/model",
    ],
)
def test_other_commands_print_the_same_with_and_without_the_plugin(command: str) -> None:
    on, off = (finish(process) for process in [start(mode, *command.split()) for mode in ("on", "off")])
    assert on[0] == off[0]
    assert without_numbers(on[1]) == without_numbers(off[1])
    assert len(on[1].splitlines()) > 3  # it did print something
    assert "swift_megatron_grpo" not in on[1]


def test_swift_megatron_runs_megatron() -> None:
    """This holds for every command, not only for GRPO: ms-swift's `swift` script has no command `megatron`."""
    command = ["export", "--model", "/no/such/model"]
    handed_over, megatron, off = (
        finish(process)
        for process in [
            start("on", "swift", "megatron", *command),
            start("on", "megatron", *command),
            start("off", "swift", "megatron", *command),
        ]
    )
    assert handed_over[0] == megatron[0]
    assert without_numbers(handed_over[1]) == without_numbers(megatron[1])
    assert "KeyError: 'megatron'" in off[1]


def test_swift_megatron_rlhf_parses_our_flags() -> None:
    """The command reaches the rank, on the CPU platform if needed, and our argument class parses the flags."""
    code, output = run("on", "swift", "megatron", "rlhf", "--rlhf_type", "grpo")
    assert code != 0
    assert re.search(r"run sh: `.*/rlhf\.py --rlhf_type grpo`", output)
    assert "no model is set; use --model" in output


def test_a_config_file_is_parsed_with_our_flags(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text("rlhf_type: grpo\n")
    code, output = run("on", "megatron", "rlhf", str(config))
    assert code != 0
    assert "no model is set; use --model" in output


def test_ranks_under_torchrun_parse_our_flags() -> None:
    code, output = run("on", "megatron", "rlhf", "--rlhf_type=grpo", NPROC_PER_NODE="2", MASTER_PORT="29417")
    assert code != 0
    assert output.count("ValueError: no model is set; use --model") == 2


def test_an_invalid_value_of_the_switch_is_explained() -> None:
    code, output = run("yes", "megatron", "rlhf", "--rlhf_type", "grpo")
    assert code == 1
    assert "SWIFT_MEGATRON_GRPO='yes' is none of its values (on: " in output

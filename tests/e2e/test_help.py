"""`megatron rlhf --help` prints the flags and exits with 0, with or without `--rlhf_type grpo` and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo import SWITCH
from tests.forking.client import run_python
from tests.forking.programs import script_of_swift
from tests.support.runs import forked_ranks

pytestmark = pytest.mark.e2e


def test_help_of_grpo_lists_flags_of_this_package(tmp_path: Path) -> None:
    """Its process is a rank like any other: tests/unit/plugin/test_autoload.py."""
    run = forked_ranks(["--rlhf_type", "grpo", "--help"], tmp_path / "help", 1, {})
    check(run.code, run.output, has_own_flags=True)


def test_help_of_rlhf_is_that_of_ms_swift() -> None:
    """A fork is the process that the `megatron` script starts; test_cli.py covers the script."""
    code, output = run_python(script_of_swift("_megatron/rlhf.py"), "--help", **{SWITCH: "on"})
    check(code, output, has_own_flags=False)


def check(code: int, output: str, has_own_flags: bool) -> None:
    assert code == 0, output[-4000:]
    assert "--num_generations" in output and "--loss_type" in output
    assert ("--max_tokens_per_micro_batch" in output) == has_own_flags

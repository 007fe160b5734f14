"""`megatron rlhf --help` prints the flags and exits with 0, with or without `--rlhf_type grpo` and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo import SWITCH

pytestmark = pytest.mark.e2e
MEGATRON = Path(sys.executable).with_name("megatron")


@pytest.mark.parametrize(
    ("rlhf_type", "has_own_flags"), [(["--rlhf_type", "grpo"], True), ([], False)], ids=["grpo", "no rlhf_type"]
)
def test_help_is_printed(rlhf_type: list[str], has_own_flags: bool) -> None:
    """The help lists flags of this package for `--rlhf_type grpo`; without it, it is ms-swift's."""
    process = subprocess.run(
        [str(MEGATRON), "rlhf", *rlhf_type, "--help"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", SWITCH: "on"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert "--num_generations" in process.stdout and "--loss_type" in process.stdout
    assert ("--max_tokens_per_micro_batch" in process.stdout) == has_own_flags

"""`megatron rlhf --help` prints the flags and exits with 0, with or without `--rlhf_type grpo` and without a GPU."""

from __future__ import annotations

import pytest

from swift_megatron_grpo import SWITCH
from tests.forking.client import run_python
from tests.forking.programs import script_of_swift

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("rlhf_type", "has_own_flags"), [(["--rlhf_type", "grpo"], True), ([], False)], ids=["grpo", "no rlhf_type"]
)
def test_help_is_printed(rlhf_type: list[str], has_own_flags: bool) -> None:
    """The help lists flags of this package for `--rlhf_type grpo`; without it, it is ms-swift's.

    A fork is the process that the `megatron` script starts; test_cli.py covers the script.
    """
    code, output = run_python(script_of_swift("_megatron/rlhf.py"), *rlhf_type, "--help", **{SWITCH: "on"})
    assert code == 0, output[-4000:]
    assert "--num_generations" in output and "--loss_type" in output
    assert ("--max_tokens_per_micro_batch" in output) == has_own_flags

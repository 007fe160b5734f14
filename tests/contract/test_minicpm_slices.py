"""Compare how ms-swift and vLLM cut the images of a MiniCPM-V, which this trainer refuses: docs/models.md."""

from __future__ import annotations

import json
from pathlib import Path

from swift_megatron_grpo.cli.tiny_models import save_tiny_model
from tests.forking.client import run_script
from tests.paths import PROGRAMS


def test_slices_are_those_of_vllm_if_the_checkpoint_has_as_many(tmp_path: Path) -> None:
    """ms-swift's template cuts into at most 9 of them, and vLLM into as many as preprocessor_config.json says."""
    model = save_tiny_model(tmp_path / "model", "minicpmv4_6")
    run_script(PROGRAMS / "contract" / "minicpm_slices.py", model, tmp_path / "equal.json", "9", "4", kind="upstream")
    equal = json.loads((tmp_path / "equal.json").read_text())
    assert equal["9"] == [True] * 4
    assert equal["4"] == [True, True, True, False]

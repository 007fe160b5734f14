"""Compare a run on conversations with plain transformers, which run in a separate process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forking.client import run_script
from tests.paths import PROGRAMS

_SCRIPT = PROGRAMS / "e2e" / "hf_conversations.py"


def check_with_transformers(step: dict[str, Any], model: Path, dumped: Path) -> None:
    reference = json.loads(run_script(_SCRIPT, model, dumped, 4).splitlines()[-1])
    assert reference["logprob_difference"] < 1e-4 and reference["grad_norm"] > 0.01
    assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)

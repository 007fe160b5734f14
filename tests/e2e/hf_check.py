"""Compare a run on conversations with plain transformers, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forking.client import run_script

_SCRIPT = Path(__file__).with_name("hf_conversations.py")


def check_by_hand(step: dict[str, Any], model: Path, dumped: Path) -> None:
    by_hand = json.loads(run_script(_SCRIPT, model, dumped, 4).splitlines()[-1])
    assert by_hand["logprob_difference"] < 1e-4 and by_hand["grad_norm"] > 0.01
    assert step["grad_norm"] == pytest.approx(by_hand["grad_norm"], rel=1e-4)

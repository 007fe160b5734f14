"""Compare a run on conversations with plain transformers, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).with_name("hf_conversations.py")


def check_by_hand(step: dict[str, Any], model: Path, dumped: Path) -> None:
    command = [sys.executable, str(_SCRIPT), str(model), str(dumped), "4"]
    by_hand = json.loads(subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    assert by_hand["logprob_difference"] < 1e-4 and by_hand["grad_norm"] > 0.01
    assert step["grad_norm"] == pytest.approx(by_hand["grad_norm"], rel=1e-4)

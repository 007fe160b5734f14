"""generation/sampling.py asks vLLM by itself, for speed: the answers are those of ms-swift's `infer`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import REPOSITORY, make_model


@pytest.mark.e2e
def test_the_answers_are_those_of_ms_swifts_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    environment = {**os.environ, "MASTER_PORT": str(random.randint(20000, 32000))}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.same_answers", str(model)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    plain, stopped = json.loads(finished.stdout.splitlines()[-1])
    for told in (plain, stopped):
        assert told["mine"] == told["theirs"] and len(told["mine"]) == 9
        assert told["versions"] == [3] * 9
    assert [len(ids) for _, ids, *_ in plain["mine"]] == [24] * 6 + [20] * 3
    reasons = [reason for *_, reason, _ in stopped["mine"]]
    assert "stop" in reasons and all(len(ids) < 20 for _, ids, *_ in stopped["mine"][-3:])

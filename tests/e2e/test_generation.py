"""vLLM is asked without ms-swift's `infer`, for speed (vllm_sampling.py): the answers are the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY


def said_by(script: str, model: Path) -> Any:
    environment = {**os.environ, "MASTER_PORT": str(random.randint(20000, 32000))}
    finished = subprocess.run(
        [sys.executable, "-m", script, str(model)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.e2e
def test_the_answers_are_those_of_ms_swifts_engine(dense: Path) -> None:
    plain, stopped = said_by("tests.e2e.same_answers", dense)
    for told in (plain, stopped):
        assert told["mine"] == told["theirs"] and len(told["mine"]) == 9
        assert told["versions"] == [3] * 9
    assert [len(ids) for _, ids, *_ in plain["mine"]] == [24] * 6 + [20] * 3
    reasons = [reason for *_, reason, _ in stopped["mine"]]
    assert "stop" in reasons and all(len(ids) < 20 for _, ids, *_ in stopped["mine"][-3:])


@pytest.mark.e2e
def test_a_servers_answers_are_those_of_ms_swifts_and_cost_less(dense: Path) -> None:
    told = said_by("tests.e2e.server_engine", dense)
    for mine, theirs in told["pairs"]:  # greedy, seeded, with a stop word
        assert mine == theirs
    assert [len(ids) for (_, ids, *_), _ in told["pairs"]][:6] == [24, 24, 20] * 2
    assert "stop" in {reason for (_, _, _, reason, _), _ in told["pairs"][6:]}
    assert len({tuple(ids) for _, ids, *_ in told["together"]}) == 8  # each with a seed of its own
    assert told["encoded"] == 1 and told["kept"] == 0
    assert told["left"] == 0  # in the engine, of 64 that were taken back
    theirs, mine = (min(costs) for costs in zip(*told["costs"], strict=True))
    assert mine < 0.9 * theirs, told["costs"]

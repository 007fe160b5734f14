"""Requests bypass ms-swift's `infer` for speed (vllm_shared/sampling.py): the completions are the same."""

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


def run_module(module: str, model: Path) -> Any:
    environment = {**os.environ, "MASTER_PORT": str(random.randint(20000, 32000))}
    finished = subprocess.run(
        [sys.executable, "-m", module, str(model)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.e2e
def test_completions_match_those_of_ms_swifts_engine(dense: Path) -> None:
    plain, stopped = run_module("tests.e2e.same_answers", dense)
    for result in (plain, stopped):
        assert result["ours"] == result["stock"] and len(result["ours"]) == 9
        assert result["versions"] == [3] * 9
    assert [len(ids) for _, ids, *_ in plain["ours"]] == [24] * 6 + [20] * 3
    reasons = [reason for *_, reason, _ in stopped["ours"]]
    assert "stop" in reasons and all(len(ids) < 20 for _, ids, *_ in stopped["ours"][-3:])


@pytest.mark.e2e
def test_completions_of_a_server_match_ms_swifts_and_cost_less(dense: Path) -> None:
    report = run_module("tests.e2e.server_engine", dense)
    for ours, stock in report["pairs"]:  # greedy, seeded, with a stop word
        assert ours == stock
    assert [len(ids) for (_, ids, *_), _ in report["pairs"]][:6] == [24, 24, 20] * 2
    assert "stop" in {reason for (_, _, _, reason, _), _ in report["pairs"][6:]}
    assert len({tuple(ids) for _, ids, *_ in report["together"]}) == 8  # each with its own seed
    assert report["encoded"] == 1 and report["kept"] == 0
    assert report["left"] == 0  # in the engine, of 64 that were cancelled
    stock, ours = (min(costs) for costs in zip(*report["costs"], strict=True))
    assert ours < 0.9 * stock, report["costs"]

"""The cases of one node with the smallest models of the same types, on two CPU ranks; on four where two are too few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.node.cases import Case, cases
from tests.paths import REPOSITORY

OF_TWO = [(2, case) for case in cases(2)]
OF_FOUR = [(4, case) for case in cases(4) if case.name.startswith("step-full-30b")]


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("gpus", "case"), [pytest.param(gpus, case, id=case.name) for gpus, case in [*OF_TWO, *OF_FOUR]]
)
def test_a_case_of_a_node_runs_on_ranks_of_a_cpu(gpus: int, case: Case, tmp_path: Path) -> None:
    """bench.py compares the tokens that each trainer trained with those of the workload."""
    command = [sys.executable, "-m", "benchmarks.eight", "run", case.name, "--gpus", str(gpus), "--dry", "--out",
               str(tmp_path), "--work", str(tmp_path / "work"), "--seconds", "850"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert done.returncode == 0, done.stdout
    processes = json.loads((tmp_path / f"{case.name}.json").read_text())["processes"]
    tried = sorted((process["arm"], process["setting"]) for process in processes)
    assert tried == sorted([("ours", name) for name in case.ours] + [("stock", name) for name in case.stock])
    for process in processes:
        assert process["status"] == "ok" and process["steps"], process

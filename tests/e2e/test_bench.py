"""The benchmarks on this machine: both arms of each do the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.e2e
@pytest.mark.slow
def test_the_train_phase_is_faster_than_ms_swifts_on_one_cpu_rank(tmp_path: Path) -> None:
    results = tmp_path / "here.json"
    command = [sys.executable, "-m", "benchmarks.bench", "train", "--json", str(results),
               "--work", str(tmp_path / "work"), "--shape", "tiny", "--completions", "32", "--generations", "4",
               "--lengths", "lognormal:48:0.9:192", "--dtype", "float32", "--ours", "tokens1024", "--stock", "mbs8",
               "--steps", "4", "--rounds", "2"]  # fmt: skip
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=850)
    assert done.returncode == 0, done.stdout
    processes = json.loads(results.read_text())["processes"]
    assert [process["arm"] for process in processes] == ["ours", "stock", "ours", "stock"]
    norms = [[step["grad_norm"] for step in process["steps"]] for process in processes]
    assert all(steps == pytest.approx(norms[0], rel=1e-4) for steps in norms)
    assert float(done.stdout.split("ratio")[-1]) >= 1.5, done.stdout


@pytest.mark.e2e
@pytest.mark.slow
def test_a_server_generates_as_many_tokens_as_the_training_process(tmp_path: Path) -> None:
    results = tmp_path / "server.json"
    command = [sys.executable, "-m", "benchmarks.bench_server", "--json", str(results), "--dry", "--work",
               str(tmp_path / "work")]  # fmt: skip
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400)
    assert done.returncode == 0, done.stdout
    report = json.loads(results.read_text())
    assert {arm: [one["tokens"] for one in rounds] for arm, rounds in report["rounds"].items()} == {
        "in_process": [2 * 4 * 32], "server": [2 * 4 * 32]
    }  # fmt: skip
    assert report["ratio"] == report["seconds"]["server"] / report["seconds"]["in_process"]

"""The benchmarks on this machine: all arms of each run do the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking.client import run_script
from tests.paths import REPOSITORY


@pytest.mark.e2e
@pytest.mark.slow
def test_the_train_phase_is_faster_than_ms_swifts_on_one_cpu_rank(tmp_path: Path) -> None:
    results = tmp_path / "here.json"
    command = [sys.executable, "-m", "benchmarks.bench", "train", "--json", str(results),
               "--work", str(tmp_path / "work"), "--shape", "tiny", "--completions", "32", "--generations", "4",
               "--lengths", "lognormal:48:0.9:192", "--dtype", "float32", "--ours", "tokens1024", "--stock", "mbs8",
               "--steps", "4", "--rounds", "2", "--random-weights"]  # fmt: skip
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=850)
    assert done.returncode == 0, done.stdout
    processes = json.loads(results.read_text())["processes"]
    assert [process["arm"] for process in processes] == ["ours", "stock", "ours", "stock"]
    norms = [[step["grad_norm"] for step in process["steps"]] for process in processes]
    assert all(steps == pytest.approx(norms[0], rel=1e-4) for steps in norms)
    assert float(done.stdout.split("ratio")[-1]) >= 1.5, done.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_trl_measures_whole_steps_of_the_same_completions(tmp_path: Path, lora: bool) -> None:
    results = tmp_path / "here.json"
    engine = "--vllm_enforce_eager true --vllm_gpu_memory_utilization 0.3"
    flags = "--tuner_type lora --lora_rank 4 --lora_alpha 8 --target_modules all-linear" if lora else ""
    command = [sys.executable, "-m", "benchmarks.bench", "step", "--json", str(results),
               "--work", str(tmp_path / "work"), "--shape", "toy", "--completions", "16", "--generations", "4",
               "--lengths", "lognormal:20:0.8:60", "--prompts", "constant:48", "--dtype", "float32", "--ours",
               "tokens1024", "--trl", "mbs8", "mbs4+recompute", "--steps", "3", "--rounds", "1", "--ahead",
               "--flags", f"{engine} {flags}"]  # fmt: skip
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=850)
    assert done.returncode == 0, done.stdout  # bench.py also compares the tokens that each arm trained
    ours, *trl = json.loads(results.read_text())["processes"]
    assert [process["arm"] for process in trl] == ["trl", "trl"]
    for process in [ours, *trl]:
        assert process["status"] == "ok" and len(process["steps"]) == 2
        for step in process["steps"]:
            assert {"generation", "weight_sync", "forward_backward", "optimizer"} <= set(step["phases"])
            assert sum(step["phases"].values()) == pytest.approx(step["seconds"], abs=1e-3)
            assert step["loss"] == pytest.approx(0.0, abs=1e-6)  # on policy, advantages of a group sum to 0
    norms = [process["steps"][0]["grad_norm"] for process in trl]
    # vLLM's seed is the same for both, the adapters' first values are not: TRL makes them before it sets a seed.
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=0.3 if lora else 0.05)


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
    assert report["ratio"] > 0 and set(report["seconds"]) == {"in_process", "server"}


@pytest.mark.e2e
def test_both_ways_to_the_experts_of_other_ranks_compute_the_same(tmp_path: Path) -> None:
    results = tmp_path / "dispatch.json"
    script = REPOSITORY / "benchmarks" / "bench_dispatch.py"  # it also compares outputs and gradients
    run_script(script, "--json", results, "--dry", ranks=2, kind="trainer")
    rows = json.loads(results.read_text())["rows"]
    assert [row["way"] for row in rows] == ["each", "once"] * 2
    for each, once in zip(rows[::2], rows[1::2], strict=True):
        assert 0 < once["rows"] < each["rows"] and once["forward_ms"] > 0

"""On a real GPU: who leaves really frees memory, comes back to the bit, and every phase is at its level every time.

pytest -m gpu tests/gpu/test_residency.py -s        prints the speeds as well
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest

from swift_megatron_grpo.tools.check_layouts import base_flags, launch, task
from tests.paths import REPOSITORY

pytestmark = pytest.mark.gpu
MIB, GIB = 2**20, 2**30
CYCLES = 6
# 0.8 billion weights: 13 GiB of trained state, more than the tight share leaves
SHAPE = ["--layers", "16", "--hidden", "2048", "--heads", "16", "--kv-heads", "8", "--head-dim", "128",
         "--intermediate", "6144"]  # fmt: skip
OFFLOAD = ["--offload_model", "true", "--offload_optimizer", "true", "--offload_grad", "true"]
# vLLM takes nearly all of the GPU, or little of it
SHARES = {
    "tight": ["--vllm_gpu_memory_utilization", "0.92", *OFFLOAD],
    "roomy": ["--vllm_gpu_memory_utilization", "0.3", *OFFLOAD],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("residency")
    script = REPOSITORY / "scripts" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(folder / "model"), *SHAPE], check=True)

    def flags(*extra: str) -> list[str]:
        settings = argparse.Namespace(
            model=str(folder / "model"), tuner="full", dtype="bfloat16", attention_backend="fused", extra=list(extra)
        )
        return base_flags(settings, str(folder))

    patch = pytest.MonkeyPatch()
    patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    launch(1, [task("tests.gpu.phases:round_trips", out=str(folder / "trips"), flags=flags("--beta", "0.1")),
               task("tests.dist.offloading:main", out=str(folder / "steps"), flags=flags("--beta", "0.1"))],
           folder)  # fmt: skip
    patch.undo()
    for name, share in SHARES.items():  # an engine for each, and a process for each engine
        sleeping = flags("--sleep_level", "2", "--vllm_max_model_len", "256", *share)
        launch(1, [task("tests.gpu.phases:main", out=str(folder / name), flags=sleeping, cycles=CYCLES)], folder)
    files = {"steps": "steps.0.json", "trips": "trips.json", **{name: f"{name}.json" for name in SHARES}}
    return {name: json.loads((folder / file).read_text()) for name, file in files.items()}


def test_steps_are_the_same_to_the_bit(told: dict[str, Any]) -> None:
    steps = told["steps"]
    assert steps["metrics_equal"] == [True, True, True] and steps["weights_differ"] == [] and steps["trained"]


def test_a_round_trip_frees_everything_and_changes_nothing(told: dict[str, Any]) -> None:
    size = told["trips"]["bytes"]
    assert size > GIB
    for trip in told["trips"]["trips"]:
        assert trip["equal"]
        before, away, back = trip["levels"]
        assert abs(before["allocated"] - away["allocated"] - size) < 8 * MIB
        freed = away["free"] - before["free"]
        assert freed > 0.95 * size, trip["kept"]  # the driver has it, not torch's cache
        assert abs(back["allocated"] - before["allocated"]) < 8 * MIB
    leave, come_back = (min(trip["seconds"][i] for trip in told["trips"]["trips"]) for i in (0, 1))
    print(f"\n{size / GIB:.2f} GiB leave in {leave:.3f} s, come back in {come_back:.3f} s")


@pytest.mark.parametrize("share", SHARES)
def test_every_phase_is_at_its_level_every_time(told: dict[str, Any], share: str) -> None:
    cycles = told[share]["levels"][2:]  # Adam's states and cuBLAS's workspaces are made in the first ones
    for phase in cycles[0]:
        free = [levels[phase]["free"] for levels in cycles]
        assert max(free) - min(free) < 256 * MIB, (phase, free)
    for levels in cycles:
        taken = levels["before the cache"]["free"] - levels["awake"]["free"]
        assert 0 < taken < told[share]["to wake"] + 64 * MIB


def test_what_fits_stays_and_what_does_not_leaves(told: dict[str, Any]) -> None:
    assert told["roomy"]["away"] == [[]] * CYCLES
    for away in told["tight"]["away"][1:]:  # the optimizer has no state before the first step
        assert "gradients" in away  # the cheapest to move is the first to go

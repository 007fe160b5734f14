"""Offloading on a GPU frees memory, restores every bit, and each phase uses the same memory in every cycle.

pytest -m gpu tests/gpu/test_residency.py -s        also prints the speed
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, launch, task
from tests.paths import REPOSITORY

pytestmark = pytest.mark.gpu
MIB, GIB = 2**20, 2**30
CYCLES = 6
MOST_FOR_ACTIVATIONS = 4 * GIB  # that an engine counts in addition to its cache (generation/local/engine.py)
# 0.8 billion weights: 13 GiB of trained state, more than the tight share leaves free
SHAPE = ["--layers", "16", "--hidden", "2048", "--heads", "16", "--kv-heads", "8", "--head-dim", "128",
         "--intermediate", "6144"]  # fmt: skip
OFFLOAD = ["--offload_model", "true", "--offload_optimizer", "true", "--offload_grad", "true"]
# vLLM uses nearly all of the GPU, or little of it
SHARES = {
    "tight": ["--vllm_gpu_memory_utilization", "0.92", *OFFLOAD],
    "roomy": ["--vllm_gpu_memory_utilization", "0.3", *OFFLOAD],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("residency")
    script = REPOSITORY / "scripts" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(folder / "model"), *SHAPE], check=True)

    def flags(*extra: str) -> list[str]:
        return base_flags(
            str(folder / "model"), str(folder), "full", "bfloat16", attention_backend="fused", extra=extra
        )

    patch = pytest.MonkeyPatch()
    patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    launch(1, [task("tests.programs.gpu.phases:round_trips", out=str(folder / "trips"), flags=flags("--beta", "0.1")),
               task("tests.programs.dist.offloading:main", out=str(folder / "steps"), flags=flags("--beta", "0.1"))],
           folder)  # fmt: skip
    patch.undo()
    for name, share in SHARES.items():  # one process for each, because a process can have only one engine
        sleeping = flags("--sleep_level", "2", "--vllm_max_model_len", "256", *share)
        launch(
            1, [task("tests.programs.gpu.phases:main", out=str(folder / name), flags=sleeping, cycles=CYCLES)], folder
        )
    files = {"steps": "steps.0.json", "trips": "trips.json", **{name: f"{name}.json" for name in SHARES}}
    return {name: json.loads((folder / file).read_text()) for name, file in files.items()}


def test_steps_with_and_without_offloading_are_bitwise_equal(results: dict[str, Any]) -> None:
    steps = results["steps"]
    assert steps["metrics_equal"] == [True] * 5 and steps["weights_differ"] == [] and steps["trained"]


def test_a_round_trip_frees_everything_and_changes_nothing(results: dict[str, Any]) -> None:
    size = results["trips"]["bytes"]
    assert size > GIB
    for trip in results["trips"]["trips"]:
        assert trip["equal"]
        before, offloaded, restored = trip["levels"]
        assert abs(before["allocated"] - offloaded["allocated"] - size) < 8 * MIB
        freed = offloaded["free"] - before["free"]
        assert freed > 0.95 * size, trip["kept"]  # returned to the driver, not kept in torch's cache
        assert abs(restored["allocated"] - before["allocated"]) < 8 * MIB
    offload, restore = (min(trip["seconds"][i] for trip in results["trips"]["trips"]) for i in (0, 1))
    print(f"\n{size / GIB:.2f} GiB are offloaded in {offload:.3f} s and restored in {restore:.3f} s")


@pytest.mark.parametrize("share", SHARES)
def test_each_phase_uses_the_same_memory_in_every_cycle(results: dict[str, Any], share: str) -> None:
    cycles = results[share]["levels"][2:]  # the first cycles allocate Adam's states and cuBLAS's workspaces
    for phase in cycles[0]:
        free = [levels[phase]["free"] for levels in cycles]
        assert max(free) - min(free) < 256 * MIB, (phase, free)


@pytest.mark.parametrize("share", SHARES)
def test_the_second_decision_counts_what_waking_the_cache_takes(results: dict[str, Any], share: str) -> None:
    for levels, to_wake in list(zip(results[share]["levels"], results[share]["to wake"], strict=True))[2:]:
        allocated = levels["before the cache"]["free"] - levels["awake"]["free"]
        assert allocated > GIB  # nearly all of the engine's share
        assert 0.9 * allocated < to_wake < allocated + MOST_FOR_ACTIVATIONS + 256 * MIB


def test_only_state_that_does_not_fit_is_offloaded(results: dict[str, Any]) -> None:
    assert results["roomy"]["offloaded"] == [[]] * CYCLES
    for offloaded in results["tight"]["offloaded"][1:]:  # the optimizer has no state before the first step
        assert "gradients" in offloaded  # the cheapest to move is offloaded first

"""Faults on GPUs end the run with a message, without a hang and with complete checkpoints, unless it can continue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.paths import PROGRAMS
from tests.support.runs import REWARDS, SIZE_FOR_GPUS, Finished, make_dataset, make_model, megatron_rlhf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
FAULTS = PROGRAMS / "gpu" / "faults.py"


def run(fault: str, tmp_path: Path, *flags: str) -> Finished:
    model = make_model(tmp_path / "model", "dense", SIZE_FOR_GPUS)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=64)
    return megatron_rlhf(model, dataset, tmp_path / "run", 2, [
        "--attention_backend", "fused", "--train_iters", "6", "--save_steps", "2", "--global_batch_size", "16",
        "--external_plugins", str(REWARDS), str(FAULTS), "--callbacks", "fault", *flags],
        environment={"FAULT": fault}, timeout=240)  # fmt: skip


def fail(fault: str, tmp_path: Path, *flags: str) -> Finished:
    finished = run(fault, tmp_path, *flags)
    assert finished.code != 0 and len(finished.log) == 2
    return finished


def test_out_of_memory_in_training_names_the_flag_to_lower(tmp_path: Path) -> None:
    """With tensor parallelism a pass cannot be run again, because the other rank waits in a collective of it."""
    flags = ["--tensor_model_parallel_size", "2", "--sleep_level", "1", "--max_tokens_per_micro_batch", "512"]
    finished = fail("memory", tmp_path, *flags)
    assert "rank 1 ran out of GPU memory in the train phase" in finished.output
    assert "lower --max_tokens_per_micro_batch from 512 to 256" in finished.output


def test_a_data_parallel_rank_out_of_memory_continues_with_half_the_budget(tmp_path: Path) -> None:
    finished = run("memory_once", tmp_path, "--sleep_level", "1", "--max_tokens_per_micro_batch", "512")
    assert finished.code == 0 and len(finished.log) == 6
    message = "the train phase ran out of GPU memory with --max_tokens_per_micro_batch 512; it is run again with 256"
    assert message in finished.output


def test_out_of_memory_at_wake_up_names_the_flag_to_lower(tmp_path: Path) -> None:
    finished = fail("wake", tmp_path, "--sleep_level", "2")
    assert "did not fit on the GPU" in finished.output and "--vllm_gpu_memory_utilization" in finished.output


def test_a_killed_rank_ends_the_run_and_the_last_checkpoint_is_complete(tmp_path: Path) -> None:
    began = time.monotonic()
    finished = fail("kill", tmp_path, "--sleep_level", "1")
    assert time.monotonic() - began < 150  # including start-up
    with safe_open(finished.last_checkpoint / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert names and all(file.get_tensor(name).isfinite().all() for name in names)

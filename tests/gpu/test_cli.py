"""The real command on GPUs: vLLM sleeps and wakes up next to Megatron, weights are synced, memory does not leak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.paths import PROGRAMS, REPOSITORY
from tests.support.runs import SIZE_FOR_GPUS, Finished, make_dataset, make_model, megatron_rlhf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")]
MEMORY = PROGRAMS / "gpu" / "memory_callback.py"
LETTERS = REPOSITORY / "templates" / "plugins" / "letters.py"


def run_and_check(tmp_path: Path, ranks: int, steps: int, flags: list[str], kind: str = "dense") -> Finished:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    model = make_model(tmp_path / "model", kind, SIZE_FOR_GPUS)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=64)
    finished = megatron_rlhf(model, dataset, tmp_path / "run", ranks, [
        "--attention_backend", "fused", "--vllm_enforce_eager", "false", "--vllm_max_model_len", "512",
        "--train_iters", str(steps), "--save_steps", "1000", "--global_batch_size", "16", "--lr", "1e-4",
        "--external_plugins", str(LETTERS), str(MEMORY), "--callbacks", "memory", *flags])  # fmt: skip
    assert finished.code == 0, finished.output[-4000:]
    assert "trains this run" in finished.output and len(finished.log) == steps
    for step in finished.log:
        assert step["rollout/k3_kl"] < 1e-3  # bf16 kernels of two engines; stale or missing weights give 0.01 to 1
    return finished


def allocated(finished: Finished) -> list[int]:
    """Return the bytes that torch has allocated on the first GPU at the end of every step."""
    values: list[int] = json.loads((finished.folder / "memory.json").read_text())
    return values


@pytest.mark.parametrize("level", [1, 2])
def test_one_gpu_with_sleep_and_offload(tmp_path: Path, level: int) -> None:
    flags = ["--sleep_level", str(level), "--offload_model", "true", "--offload_optimizer", "true",
             "--max_tokens_per_micro_batch", "1024", "--sync_check", "full"]  # fmt: skip
    finished = run_and_check(tmp_path, 1, 20, flags)
    assert " tensors bit for bit as they were sent" in finished.output and "failed its check" not in finished.output
    memory = allocated(finished)
    assert len(memory) == 20 and max(memory[3:]) - memory[3] < 2**20  # memory does not grow
    assert finished.log[0]["rollout/k3_kl"] < 1e-4


def test_lora_on_one_gpu(tmp_path: Path) -> None:
    run_and_check(tmp_path, 1, 5, ["--tuner_type", "lora", "--sleep_level", "2", "--beta", "0.04"])


@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true", "--vllm_tensor_parallel_size", "2"],
        ["--pipeline_model_parallel_size", "2", "--virtual_pipeline_model_parallel_size", "2"],
        ["--context_parallel_size", "2"],
    ],
    ids=["tp2", "pp2-vpp2", "cp2"],
)
def test_two_gpus(tmp_path: Path, layout: list[str]) -> None:
    run_and_check(tmp_path, 2, 4, ["--sleep_level", "1", *layout])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true",
                   "--pipeline_model_parallel_size", "2"]),
        ("moe", ["--expert_model_parallel_size", "4", "--micro_batch_size", "1"]),
    ],
)  # fmt: skip
def test_four_gpus(tmp_path: Path, kind: str, layout: list[str]) -> None:
    run_and_check(tmp_path, 4, 4, ["--sleep_level", "1", *layout], kind)

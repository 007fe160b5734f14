"""vLLM runs base and adapter of the trainer after each sleep, also after one that discards both.

CUDA graphs are captured before the first sleep and replayed after every wake-up.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import SIZE_FOR_GPUS, Finished, make_dataset, make_model, megatron_rlhf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 6


def train(folder: Path, model: Path, level: int, *flags: str, gpus: int = 1) -> Finished:
    dataset = make_dataset(folder / "data.jsonl", rows=64)
    run = megatron_rlhf(model, dataset, folder / f"level {level}", gpus, [
        "--tuner_type", "lora", "--lora_rank", "8", "--target_modules", "all-linear", "--vllm_enable_lora", "true",
        "--sleep_level", str(level), "--attention_backend", "fused", "--vllm_enforce_eager", "false",
        "--train_iters", str(STEPS), "--save_steps", "1000", "--global_batch_size", "16",
        "--max_completion_length", "64", "--lr", "1e-3", *flags])  # fmt: skip
    assert run.code == 0, run.output[-4000:]
    assert "failed its check" not in run.output and len(run.log) == STEPS
    return run


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logprobs_are_the_trainers_after_each_sleep(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "model", kind, SIZE_FOR_GPUS)
    awake, asleep = (train(tmp_path, model, level) for level in (0, 2))
    rounding = max(step["sync_check/mean_diff"] for step in awake.log)
    for step in asleep.log:
        assert step["sync_check/mean_diff"] < 2 * rounding
        assert step["rollout/k3_kl"] < 1e-3  # bf16 kernels of two engines; stale or missing weights give 0.01 to 1
    assert any(step["grad_norm"] > 0 for step in asleep.log[:-1])  # the adapter has moved


def test_an_engine_on_two_gpus_keeps_the_tables_of_its_shards(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model = make_model(tmp_path / "model", "dense", SIZE_FOR_GPUS)
    run = train(tmp_path, model, 2, "--vllm_tensor_parallel_size", "2", gpus=2)
    assert all(step["rollout/k3_kl"] < 1e-3 for step in run.log)

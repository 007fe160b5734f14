"""vLLM runs a rank-stabilised adapter with the scale that it is trained with, merged into the weights or alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import megatron_rlhf

SETTINGS = ["--tuner_type", "lora", "--lora_rank", "8", "--lora_alpha", "16", "--use_rslora", "true",
            "--lora_dropout", "0.1", "--torch_dtype", "float32", "--fp16", "false", "--lr", "1e-2",
            "--train_iters", "3", "--save_steps", "3"]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("sent", ["merged", "alone"])
def test_vllm_scales_a_rank_stabilised_adapter_as_the_trainer(
    sent: str, folder: Path, dense: Path, dataset: Path
) -> None:
    alone = "true" if sent == "alone" else "false"
    ranks = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]
    run = megatron_rlhf(dense, dataset, folder / sent, 2, [*SETTINGS, *ranks, "--vllm_enable_lora", alone])
    assert run.code == 0, run.output[-3000:]
    assert "Loading: " in run.output  # test_refusals.py relies on it
    differences = [step["sync_check/mean_diff"] for step in run.log]
    assert len(differences) == 3 and max(differences) < 1e-5  # in fp32, after steps that moved the adapter
    assert any(step["grad_norm"] > 0 for step in run.log)
    assert "--lora_dropout 0.1: log-probs of a training step are computed with dropout" in run.output
    config = json.loads((run.last_checkpoint / "adapter_config.json").read_text())
    assert config["use_rslora"] is True and config["lora_dropout"] == 0.1

"""vLLM runs a rank-stabilised adapter with the scale that it is trained with, merged into the weights or alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.runs import CANNED, PLUGINS, REWARDS, megatron_rlhf

SETTINGS = ["--tuner_type", "lora", "--lora_rank", "8", "--lora_alpha", "16", "--use_rslora", "true",
            "--lora_dropout", "0.1", "--torch_dtype", "float32", "--fp16", "false", "--lr", "1e-2",
            "--train_iters", "3", "--save_steps", "3"]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.e2e
@pytest.mark.parametrize("sent", [pytest.param("merged", marks=pytest.mark.nightly), "alone"])
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


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("vllm_ranks", ["1", "2"])
def test_base_and_adapter_are_sent_again_after_a_sleep_discards_both(
    vllm_ranks: str, folder: Path, dense: Path, dataset: Path
) -> None:
    """Every step is that of a run whose engine never sleeps, bit for bit."""
    flags = [*SETTINGS, "--lora_dropout", "0", "--vllm_enable_lora", "true", "--vllm_tensor_parallel_size", vllm_ranks]
    discards = ["--sleep_level", "2", "--external_plugins", str(REWARDS), str(PLUGINS / "discarding_sleep.py")]
    awake = megatron_rlhf(dense, dataset, folder / f"awake-{vllm_ranks}", 2, flags)
    asleep = megatron_rlhf(dense, dataset, folder / f"asleep-{vllm_ranks}", 2, [*flags, *discards])
    for run in (awake, asleep):
        assert run.code == 0, run.output[-4000:]
    compared = ("loss", "grad_norm", "reward", "sync_check/mean_diff", "sync_check/max_diff")
    steps = [[{name: step[name] for name in compared} for step in run.log] for run in (awake, asleep)]
    assert len(steps[0]) == 3 and steps[0] == steps[1] and steps[0][-1]["sync_check/mean_diff"] < 1e-5
    lost = megatron_rlhf(
        dense, dataset, folder / f"lost-{vllm_ranks}", 2, [*flags, *discards], {"BASE_STAYS_LOST": "1"}
    )
    assert lost.code != 0 and "failed its check twice" in lost.output


@pytest.mark.e2e
def test_vllm_applies_an_adapter_to_the_weights_of_mcore_model(folder: Path, dense: Path, dataset: Path) -> None:
    steep = ["--lr", "1e-1", "--train_iters", "1", "--save_steps", "1", "--save_safetensors", "false", *CANNED]
    full = megatron_rlhf(dense, dataset, folder / "full", 1, ["--torch_dtype", "float32", "--fp16", "false", *steep])
    assert full.code == 0, full.output[-3000:]
    flags = [*SETTINGS, "--lora_dropout", "0", "--vllm_enable_lora", "true", "--mcore_model", str(full.last_checkpoint)]
    run = megatron_rlhf(dense, dataset, folder / "above-full", 1, flags)
    assert run.code == 0, run.output[-3000:]
    differences = [step["sync_check/mean_diff"] for step in run.log]
    assert len(differences) == 3 and max(differences) < 1e-5


@pytest.mark.e2e
def test_training_starts_at_the_adapter_of_its_reference(folder: Path, dense: Path, dataset: Path) -> None:
    """The KL is 0 until the first update: both adapters are those of supervised tuning."""
    tuned = folder / "tuned"
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(dense), config).save_pretrained(tuned)
    flags = ["--adapters", str(tuned), "--ref_adapters", str(tuned), "--beta", "0.1", "--torch_dtype", "float32",
             "--target_modules", "linear_proj", "linear_fc2", "--fp16", "false", "--lr", "1e-2",
             "--train_iters", "2", "--save_steps", "2"]  # fmt: skip
    run = megatron_rlhf(dense, dataset, folder / "from-tuned", 1, flags)
    assert run.code == 0, run.output[-3000:]
    assert [abs(step["kl"]) > 1e-5 for step in run.log] == [False, True]
    saved = load_file(run.last_checkpoint / "adapter_model.safetensors")
    before = load_file(tuned / "adapter_model.safetensors")
    assert set(saved) == set(before) and all(not torch.equal(saved[name].float(), before[name]) for name in before)
    other = megatron_rlhf(dense, dataset, folder / "refused", 1, flags[2:])
    assert other.code != 0 and "its adapter has --lora_alpha 16, and the trained one --lora_alpha 32" in other.output

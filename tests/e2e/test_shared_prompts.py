"""--share_prompts in real runs: the same steps as with repeated prompts, with old and reference log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import make_model, megatron_rlhf

pytestmark = pytest.mark.e2e
EXACT = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--save_steps", "100"]
STEPS = ["--num_iterations", "2", "--train_iters", "4", "--global_batch_size", "16", "--beta", "0.04"]


@pytest.mark.nightly
def test_a_run_that_shares_prompts_is_that_which_repeats_them(folder: Path, dense: Path, dataset: Path) -> None:
    flags = [*EXACT, *STEPS, "--max_tokens_per_micro_batch", "256", "--tensor_model_parallel_size", "2",
             "--sequence_parallel", "true"]  # fmt: skip
    repeated = megatron_rlhf(dense, dataset, folder / "repeated", 2, [*flags, "--share_prompts", "false"])
    shared = megatron_rlhf(dense, dataset, folder / "shared", 2, [*flags, "--share_prompts", "true"])
    assert repeated.code == 0 and shared.code == 0, shared.output[-4000:]
    for step, wanted in zip(shared.log, repeated.log, strict=True):
        for name in ("loss", "grad_norm", "kl", "rollout/k3_kl"):
            assert step[name] == pytest.approx(wanted[name], rel=2e-5, abs=1e-6), name
    assert shared.log[0]["grad_norm"] > 0 and shared.log[1]["kl"] > 0


def test_a_model_with_linear_attention_repeats_prompts_and_logs_why(folder: Path, dataset: Path) -> None:
    model = make_model(folder / "linear", kind="qwen3_5")
    flags = ["--train_iters", "1", "--save_steps", "100", "--micro_batch_size", "4", "--share_prompts"]
    run = megatron_rlhf(model, dataset, folder / "auto", 1, [*flags, "auto"])
    assert run.code == 0, run.output[-4000:]
    assert "--share_prompts auto repeats prompts for each completion: layers with gated_delta_net" in run.output
    no_vllm = ["--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 1}']  # it would end the run if it started
    run = megatron_rlhf(model, dataset, folder / "true", 1, [*flags, "true", *no_vllm])
    early = "--share_prompts true: layers with linear attention have a state"  # by config.json, before a model loads
    assert run.code != 0 and early in run.output and "use --share_prompts auto" in run.output

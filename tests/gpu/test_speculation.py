"""Drafts change no completion on a GPU, where a row's logits may differ by rounding with the rows beside it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.prediction_heads import make_predictable
from tests.support.runs import SIZE_FOR_GPUS, make_dataset, make_model, megatron_rlhf, read_json_lines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROLLOUTS = 3
SECOND_RUNNER_DRAFTS = find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None  # as from vLLM 0.32 on


@pytest.mark.parametrize(("dtype", "eager"), [("float32", "true"), ("bfloat16", "false")])
def test_a_run_with_drafts_generates_what_one_without_does(tmp_path: Path, dtype: str, eager: str) -> None:
    """The weights do not change, so that a completion that differs by rounding changes no other one."""
    model = make_model(tmp_path / "model", "dense", SIZE_FOR_GPUS)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=4)
    flags = ["--torch_dtype", dtype, "--fp16", "false", "--vllm_enforce_eager", eager]
    drafts = [*flags, "--speculative_rollouts", "history"]
    if not SECOND_RUNNER_DRAFTS:
        run = megatron_rlhf(model, dataset, tmp_path / "refused", 1, [*drafts, "--seed_completions", "true"])
        assert run.code != 0 and "in its first model runner alone" in run.output
        return
    plain, _ = trained(tmp_path / "plain", model, dataset, flags)
    drafted, log = trained(tmp_path / "drafted", model, dataset, drafts)
    assert all(line["drafts/accepted"] > 0 for line in log)
    equal = [found == expected for (expected, _), (found, _) in zip(plain, drafted, strict=True)]
    bound, share = (1e-4, 0.95) if dtype == "float32" else (0.1, 0.5)
    assert sum(equal) >= share * len(equal)
    for (_, logprobs), (_, others), same in zip(plain, drafted, equal, strict=True):
        if same:
            assert max(abs(a - b) for a, b in zip(logprobs, others, strict=True)) < bound


def test_predicted_drafts_change_no_completion_or_are_refused(tmp_path: Path) -> None:
    """The models have linear attention, whose states vLLM before 0.32 does not keep apart."""
    model = make_model(tmp_path / "model", "qwen3_5", SIZE_FOR_GPUS)
    make_predictable(model)
    dataset = make_dataset(tmp_path / "data.jsonl", rows=4)
    flags = ["--torch_dtype", "float32", "--fp16", "false", "--vllm_enforce_eager", "true",
             "--vllm_enable_prefix_caching", "false", "--top_p", "1", "--top_k", "-1",
             "--vit_attn_impl", "sdpa",
             # FlashInfer's prefill of delta nets, vLLM's default on Hopper, reads 16 bits and compiles for minutes.
             "--vllm_engine_kwargs", '{"gdn_prefill_backend": "triton"}']  # fmt: skip
    drafts = [*flags, "--speculative_rollouts", "mtp", "--speculative_tokens", "2"]
    if not SECOND_RUNNER_DRAFTS:
        run = megatron_rlhf(model, dataset, tmp_path / "refused", 1, [*drafts, "--seed_completions", "true"])
        assert run.code != 0 and "continues from the state before accepted drafts" in run.output
        return
    plain, _ = trained(tmp_path / "plain", model, dataset, flags)
    drafted, log = trained(tmp_path / "drafted", model, dataset, drafts)
    assert all(line["drafts/accepted"] > 0 for line in log)
    equal = [found == expected for (expected, _), (found, _) in zip(plain, drafted, strict=True)]
    assert sum(equal) >= 0.95 * len(equal)


def trained(folder: Path, model: Path, dataset: Path, flags: list[str]) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return tokens and log-probs of the completions, and the logged steps."""
    dump = folder / "dump"
    run = megatron_rlhf(model, dataset, folder, 1, [
        *flags, "--seed_completions", "true", "--rollout_dump", str(dump), "--train_iters", str(ROLLOUTS),
        "--temperature", "0.04", "--max_completion_length", "128", "--save_steps", "100", "--lr", "1e-12",
        "--attention_backend", "unfused", "--global_batch_size", "16"])  # fmt: skip
    assert run.code == 0, run.output[-4000:]
    rows = [row for number in range(ROLLOUTS) for row in read_json_lines(dump / f"rollout-{number:06}.jsonl")]
    return [(row["completion_ids"], row["logprobs"]) for row in rows], run.log

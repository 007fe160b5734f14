"""Drafts from the layers of multi-token prediction of models with linear attention change no completion of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.prediction_heads import make_predictable
from tests.support.runs import (
    PLUGINS,
    REWARDS,
    Finished,
    make_dataset,
    make_model,
    megatron_rlhf,
    read_json_lines,
)

pytestmark = pytest.mark.e2e
ROLLOUTS = 3
BOUND = 5e-5  # of log-probs in fp32 at a low temperature, whose sums depend on the batch
PLUGIN = ["--external_plugins", str(REWARDS), str(PLUGINS / "predicted_drafts.py")]
DRAFTS = ["--speculative_rollouts", "mtp", "--speculative_tokens", "3", *PLUGIN]


@pytest.fixture(scope="module")
def qwen3_5(folder: Path) -> Path:
    return predictable(folder, "qwen3_5")


@pytest.fixture(scope="module")
def two_rows(folder: Path) -> Path:
    return make_dataset(folder / "two.jsonl", rows=2)


@pytest.fixture(scope="module")
def plain(folder: Path, qwen3_5: Path, two_rows: Path) -> Finished:
    return trained(folder / "plain", qwen3_5, two_rows, [], ranks=2)


@pytest.mark.nightly
def test_a_run_with_drafts_on_two_ranks_generates_what_one_without_does(
    folder: Path, qwen3_5: Path, two_rows: Path, plain: Finished
) -> None:
    """The weights change between the rollouts, and the engine loses them in every sleep."""
    tensors = load_file(qwen3_5 / "model.safetensors")
    drafted = trained(folder / "drafted", qwen3_5, two_rows, [*DRAFTS, "--vllm_tensor_parallel_size", "2"], ranks=2)
    assert_equal_runs(plain, drafted)
    sent = [name for name in tensors if ".visual." not in name]
    assert f"vLLM holds all {len(sent)} tensors bit for bit" in drafted.output
    assert f"vLLM holds all {len(sent) - 15} tensors bit for bit" in plain.output


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_drafts_change_no_completion_of_other_types(folder: Path, two_rows: Path, kind: str) -> None:
    model = predictable(folder, kind)
    assert_equal_runs(
        *(trained(folder / f"{kind} {name}", model, two_rows, flags) for name, flags in (("off", []), ("on", DRAFTS)))
    )


@pytest.mark.nightly
def test_drafts_change_no_completion_of_a_run_that_trains_adapters(folder: Path, qwen3_5: Path, two_rows: Path) -> None:
    lora = ["--tuner_type", "lora", "--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "all-linear", "--lr",
            "1e-2"]  # fmt: skip
    off = trained(folder / "adapters off", qwen3_5, two_rows, lora)
    assert_equal_runs(off, trained(folder / "adapters on", qwen3_5, two_rows, [*lora, *DRAFTS]))


@pytest.mark.nightly
def test_a_wrong_rule_of_acceptance_changes_completions(
    folder: Path, qwen3_5: Path, two_rows: Path, plain: Finished
) -> None:
    drafted = trained(folder / "rule", qwen3_5, two_rows, DRAFTS, environment={"PLANTED": "rule"})
    assert [tokens for tokens, _ in completions(drafted)] != [tokens for tokens, _ in completions(plain)]


def test_a_run_whose_engine_keeps_states_of_wrong_drafts_is_stopped(
    folder: Path, qwen3_5: Path, two_rows: Path
) -> None:
    run = trained(folder / "states", qwen3_5, two_rows, DRAFTS, environment={"PLANTED": "states"})
    assert run.code != 0
    assert "vLLM's log-probs of its completions differ from the trainer's by" in run.output
    assert "vLLM may have continued from states of wrong drafts; use --speculative_rollouts off" in run.output


def assert_equal_runs(plain: Finished, drafted: Finished) -> None:
    for (expected, logprobs), (found, others) in zip(completions(plain), completions(drafted), strict=True):
        assert found == expected
        assert max(abs(a - b) for a, b in zip(logprobs, others, strict=True)) < BOUND
    assert [line["loss"] for line in drafted.log] == pytest.approx([line["loss"] for line in plain.log], abs=1e-5)
    assert all(0 < line["drafts/accepted"] < line["drafts/verified"] for line in drafted.log)
    assert all(0 < line["drafts/steps_saved"] < 1 for line in drafted.log)


def predictable(folder: Path, kind: str) -> Path:
    model = make_model(folder / kind, kind)
    make_predictable(model)
    return model


def trained(
    folder: Path,
    model: Path,
    dataset: Path,
    flags: Sequence[str],
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    exact = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--rollout_dump",
             str(folder / "dump"), "--train_iters", str(ROLLOUTS), "--temperature", "0.04", "--max_completion_length",
             "32", "--save_steps", "100", "--vllm_enable_prefix_caching", "false", "--top_p", "1", "--top_k", "-1",
             "--sync_check", "full"]  # fmt: skip
    return megatron_rlhf(model, dataset, folder, ranks, [*exact, *flags], environment)


def completions(run: Finished) -> list[tuple[Any, Any]]:
    """Return tokens and log-probs of the completions of all rollouts."""
    assert run.code == 0, run.output[-4000:]
    dump = run.folder / "dump"
    rows = [row for number in range(ROLLOUTS) for row in read_json_lines(dump / f"rollout-{number:06}.jsonl")]
    return [(row["completion_ids"], row["logprobs"]) for row in rows]

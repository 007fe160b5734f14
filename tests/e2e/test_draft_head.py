"""A layer of multi-token prediction that learns keeps drafting what a changing policy samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_predicted_drafts import DRAFTS, assert_equal_runs, predictable, trained
from tests.forking.client import run_script
from tests.support.runs import PLUGINS, Finished, make_dataset, make_model, megatron_rlhf

pytestmark = pytest.mark.e2e
LEARNS = ["--mtp_num_layers", "1"]
RESUMABLE = [*DRAFTS, *LEARNS, "--save_steps", "2", "--no_save_optim", "false", "--no_save_rng", "false"]


@pytest.fixture(scope="module")
def qwen3_5(folder: Path) -> Path:
    return predictable(folder, "qwen3_5")


@pytest.fixture(scope="module")
def two_rows(folder: Path) -> Path:
    return make_dataset(folder / "two.jsonl", rows=2)


@pytest.fixture(scope="module")
def learning(folder: Path, qwen3_5: Path, two_rows: Path) -> Finished:
    """A run of three steps on two ranks, whose engines lose all weights in every sleep."""
    return trained(folder / "learning", qwen3_5, two_rows, RESUMABLE, ranks=2)


@pytest.mark.nightly
def test_it_is_sent_compared_and_saved_and_changes_no_completion(
    folder: Path, qwen3_5: Path, two_rows: Path, learning: Finished
) -> None:
    assert_equal_runs(trained(folder / "plain", qwen3_5, two_rows, [], ranks=2), learning)
    before, after = (load_file(path / "model.safetensors") for path in (qwen3_5, learning.last_checkpoint))
    sent = [name for name in before if ".visual." not in name]
    assert f"vLLM holds all {len(sent)} tensors bit for bit" in learning.output
    layer = [name for name in before if name.startswith("mtp.")]
    assert len(layer) == 15 and before.keys() == after.keys()
    assert all((before[name].float() != after[name]).any() for name in layer)
    assert "are not trained" not in learning.output


@pytest.mark.nightly
def test_a_resumed_run_continues_it(folder: Path, qwen3_5: Path, two_rows: Path, learning: Finished) -> None:
    source = str(learning.folder / "checkpoint-2")
    flags = [*RESUMABLE, "--finetune", "false", "--mcore_model", source]
    resumed = trained(folder / "resumed", qwen3_5, two_rows, flags, ranks=2)
    assert resumed.code == 0, resumed.output[-4000:]
    [step] = resumed.log
    for name in ("drafts/loss", "drafts/accepted", "drafts/verified", "loss", "grad_norm", "learning_rate"):
        assert step[name] == learning.log[2][name], name
    # what it has learned then depends on the moments of its optimizer
    ends = [load_file(run.last_checkpoint / "model.safetensors") for run in (learning, resumed)]
    assert all((ends[0][name] == tensor).all() for name, tensor in ends[1].items())


@pytest.mark.slow  # three minutes
def test_acceptance_stays_where_a_frozen_one_falls_behind(tmp_path: Path) -> None:
    """The reward makes the policy leave out every second letter, which it rarely did when the layer learned from it."""
    model = make_model(tmp_path / "model", "qwen3_5")
    run_script(PLUGINS / "alphabet.py", model)
    dataset = make_dataset(tmp_path / "rows.jsonl", rows=32)
    frozen, learned = (written(tmp_path / name, model, dataset, flags) for name, flags in
                       (("frozen", []), ("learned", LEARNS)))  # fmt: skip
    assert [step["reward"] for step in learned.log] == [step["reward"] for step in frozen.log]
    assert accepted(frozen.log[:2]) > 0.6 and accepted(frozen.log[12:]) < 0.25
    assert accepted(learned.log[4:8]) > accepted(frozen.log[4:8]) and accepted(learned.log[12:]) > 0.5


def written(folder: Path, model: Path, dataset: Path, flags: Sequence[str]) -> Finished:
    exact = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--speculative_rollouts",
             "mtp", "--speculative_tokens", "1", "--vllm_enable_prefix_caching", "false", "--top_p", "1", "--top_k",
             "-1", "--train_iters", "16", "--lr_decay_style", "constant", "--lr_warmup_fraction", "0",
             "--adam_beta2", "0.99", "--global_batch_size", "32", "--num_generations", "8", "--micro_batch_size", "8",
             "--max_completion_length", "32", "--save_steps", "100", "--external_plugins",
             str(PLUGINS / "second_letters.py"), "--reward_funcs", "second_letters"]  # fmt: skip
    run = megatron_rlhf(model, dataset, folder, 1, [*exact, *flags], rewards=False)
    assert run.code == 0, run.output[-4000:]
    return run


def accepted(steps: Sequence[dict[str, Any]]) -> float:
    """Return the share of drafts that were accepted in these steps."""
    return float(sum(step["drafts/accepted"] for step in steps) / sum(step["drafts/verified"] for step in steps))

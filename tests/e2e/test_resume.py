"""A run resumed from a checkpoint computes the same numbers as an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import megatron_rlhf, read_json_lines

pytestmark = pytest.mark.e2e
TENSOR_PARALLEL = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]


@pytest.mark.slow  # each save of optimizer states starts processes that import everything
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--torch_dtype", "bfloat16", *TENSOR_PARALLEL]),
        (2, ["--torch_dtype", "float32", "--fp16", "false"]),
        (1, ["--torch_dtype", "bfloat16", "--tuner_type", "lora"]),
    ],
    ids=["bf16-tp2", "fp32-dp2", "lora"],
)
def test_a_resumed_run_matches_an_uninterrupted_one(
    tmp_path: Path, dense: Path, dataset: Path, ranks: int, flags: list[str]
) -> None:
    flags = [*flags, "--train_iters", "4", "--seed_completions", "true", "--no_save_optim", "false",
             "--no_save_rng", "false"]  # fmt: skip
    whole = megatron_rlhf(dense, dataset, tmp_path / "whole", ranks, flags)
    checkpoint = "--mcore_adapter" if "lora" in flags else "--mcore_model"
    flags += ["--finetune", "false", checkpoint, str(whole.folder / "checkpoint-2")]
    resumed = megatron_rlhf(dense, dataset, tmp_path / "resumed", ranks, flags)
    assert resumed.code == 0, resumed.output[-4000:]
    assert len(whole.log) == 4 and len(resumed.log) == 2
    for step, expected in zip(resumed.log, whole.log[2:], strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length", "learning_rate"):
            assert step[name] == expected[name], name


def test_resuming_in_the_same_folder_keeps_the_checkpoint_and_logs_each_step_once(
    tmp_path: Path, dense: Path, dataset: Path
) -> None:
    """A run of five steps ends; a second run resumes in the same folder from step 3, in the middle of a rollout."""
    flags = ["--save_total_limit", "2", "--save_steps", "1", "--steps_per_generation", "2", "--log_completions", "true",
             "--seed_completions", "true", "--no_save_optim", "false", "--no_save_rng", "false"]  # fmt: skip
    folder = tmp_path / "run"
    first = megatron_rlhf(dense, dataset, folder, 1, [*flags, "--train_iters", "5", "--save_total_limit", "9"])
    assert first.code == 0, first.output[-4000:]
    source = folder / "checkpoint-3"
    resume = ["--finetune", "false", "--mcore_model", str(source), "--train_iters", "7"]
    resumed = megatron_rlhf(dense, dataset, folder, 1, [*flags, *resume])
    assert resumed.code == 0, resumed.output[-4000:]
    kept = sorted(path.name for path in folder.glob("checkpoint-*[0-9]"))
    assert kept == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]  # the limit of 2, and the one resumed from
    assert [step["iteration"] for step in resumed.log] == [f"{i}/5" for i in (1, 2, 3)] + [
        f"{i}/7" for i in (4, 5, 6, 7)
    ]
    rows = read_json_lines(folder / "completions.jsonl")
    assert [row["rollout"] for row in rows] == [rollout for rollout in range(4) for _ in range(16)]

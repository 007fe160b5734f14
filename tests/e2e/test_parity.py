"""ms-swift's own trainer and this one have equal loss, KL and gradient norm in every step on the same completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import PLUGINS, REWARDS, make_model, megatron_rlhf

pytestmark = pytest.mark.e2e


# Of what ms-swift has without Megatron alone: its own trainer gets it by tests/programs/e2e/stock_distillation.py.
DISTILLATION = {
    "rlsd": ["--advantage_reweight", "rlsd", "--rlsd_lambda", "0.8", "--rlsd_reweight_clip_range", "0.4"],
    "sdar": ["--sdar_loss_coef", "0.3", "--sdar_gate_beta", "2"],
}


def both_trainers(
    folder: Path, model: Path, dataset: Path, flags: list[str], rewards: list[str], distillation: str = ""
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Train with ms-swift's own trainer and with this one on the same completions; return the metrics by step.

    `distillation`: a key of DISTILLATION.
    """
    record = folder / "record.json"
    variables = {"RECORD": str(record), "DISTILLATION": distillation}

    def run(recorder: str, name: str, plugin: bool, *more: str) -> Path:
        others = [PLUGINS / "stock_distillation.py"] if distillation and not plugin else []
        plugins = ["--external_plugins", *map(str, (REWARDS, PLUGINS / recorder, *others))]
        finished = megatron_rlhf(model, dataset, folder / name, 1, [*flags, *rewards, *plugins, *more],
                                 variables, plugin=plugin, rewards=False)  # fmt: skip
        assert finished.code == 0, finished.output[-4000:]
        assert ("trains this run" in finished.output) == plugin
        return finished.folder

    run("record_stock.py", "stock", False)
    of_ours = ["--sync_check", "off", *DISTILLATION.get(distillation, [])]
    log = (run("replay_recorded.py", "ours", True, *of_ours) / "logging.jsonl").read_text().splitlines()
    ours, stock = [json.loads(line) for line in log], json.loads(record.read_text())["steps"]
    return list(zip([line for line in ours if "loss" in line], stock, strict=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), pytest.param("bfloat16", 1e-3, marks=pytest.mark.slow)]
)
def test_numbers_match_the_stock_trainer(
    tmp_path: Path, dense: Path, dataset: Path, dtype: str, tolerance: float
) -> None:
    flags = ["--steps_per_generation", "2", "--train_iters", "4", "--beta", "0.04", "--save_steps", "100",
             "--global_batch_size", "8", "--torch_dtype", dtype, "--adam_eps", "1e-5", "--report_to", "tensorboard",
             *(["--fp16", "false"] if dtype == "float32" else [])]  # fmt: skip
    steps = both_trainers(tmp_path, dense, dataset, flags, ["--reward_funcs", "letters"])
    assert len(steps) == 4
    for step, stock in steps:
        assert step["loss"] == pytest.approx(stock["loss"], abs=tolerance)
        # The stock trainer logs the mean over micro batches of their token means, which depends on how completions
        # are split into micro batches; ours is the mean over all tokens. The loss contains the same KL in both.
        assert step["kl"] == pytest.approx(stock["kl"], rel=0.05, abs=tolerance)
        assert step["grad_norm"] == pytest.approx(stock["grad_norm"], rel=tolerance)
    assert any(abs(step["loss"]) > 1e-4 for step, _ in steps) and steps[-1][0]["kl"] > 1e-4  # it is not trivial


TAUGHT = ["--steps_per_generation", "2", "--train_iters", "4", "--save_steps", "100", "--global_batch_size", "8",
          "--torch_dtype", "float32", "--fp16", "false", "--adam_eps", "1e-5", "--temperature", "0.7",
          "--report_to", "tensorboard", "--teacher_kl_coef", "0.5"]  # fmt: skip


def check_taught(steps: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    assert len(steps) == 4
    for step, stock in steps:
        assert step["loss"] == pytest.approx(stock["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)
        assert step["teacher_kl"] > 1e-4
    assert any(abs(step["loss"]) > 1e-4 for step, _ in steps)  # it is not trivial


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rewards",
    [["--reward_funcs", "letters"], []],
    ids=["rewards", "no rewards"],
)
def test_a_teachers_numbers_match_the_stock_trainer(
    tmp_path: Path, dense: Path, dataset: Path, rewards: list[str]
) -> None:
    teacher = make_model(tmp_path / "teacher", extra=["--seed", "5", "--layers", "6", "--hidden", "96"])
    flags = [*TAUGHT, "--teacher_model", str(teacher), "--teacher_model_type", "qwen3"]
    check_taught(both_trainers(tmp_path, dense, dataset, flags, rewards))


@pytest.mark.nightly
@pytest.mark.parametrize(("teacher", "distillation"), [("another", ""), ("the policy", "rlsd"), ("another", "sdar")])
def test_a_teachers_own_prompt_gives_the_stock_trainers_numbers(
    tmp_path: Path, dense: Path, dataset: Path, teacher: str, distillation: str
) -> None:
    """The prompts of the teacher are longer or shorter than the policy's."""
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["teacher_prompt"] = "Say a. " * (number % 4) + "Write only the letter e."
    taught = tmp_path / "taught.jsonl"
    taught.write_text("\n".join(map(json.dumps, rows)))
    flags = [*TAUGHT, "--max_length", "256", "--vllm_max_model_len", "512"]
    if distillation == "sdar":  # ms-swift's loss is the mean over micro batches of their token means
        flags += ["--micro_batch_size", "4", "--global_batch_size", "4", "--steps_per_generation", "4"]
    if teacher == "another":
        model = make_model(tmp_path / "teacher", extra=["--seed", "5", "--layers", "6", "--hidden", "96"])
        flags += ["--teacher_model", str(model), "--teacher_model_type", "qwen3"]
    check_taught(both_trainers(tmp_path, dense, taught, flags, ["--reward_funcs", "letters"], distillation))

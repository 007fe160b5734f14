"""ms-swift's own trainer and this one, on the same completions: the same loss, KL and gradient norm, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import REWARDS, megatron_command

HERE = Path(__file__).parent


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), pytest.param("bfloat16", 1e-3, marks=pytest.mark.slow)]
)
def test_same_numbers_as_the_stock_trainer(
    tmp_path: Path, dense: Path, dataset: Path, dtype: str, tolerance: float
) -> None:
    flags = ["--steps_per_generation", "2", "--train_iters", "4", "--beta", "0.04", "--save_steps", "100",
             "--global_batch_size", "8", "--torch_dtype", dtype, "--adam_eps", "1e-5", "--report_to", "tensorboard",
             *(["--fp16", "false"] if dtype == "float32" else [])]  # fmt: skip
    record = tmp_path / "record.json"

    def run(plugin: str, name: str, mode: str, *more: str) -> Path:
        plugins = ["--external_plugins", str(REWARDS), str(HERE / plugin)]
        finished = megatron_command(dense, dataset, tmp_path / name, 1, [*flags, *plugins, *more],
                                    {"SWIFT_MEGATRON_GRPO": mode, "RECORD": str(record)})  # fmt: skip
        assert finished.code == 0, finished.output[-4000:]
        assert ("trains this run" in finished.output) == (mode == "on")
        return finished.folder

    run("record_stock.py", "stock", "platform")
    ours = run("replay_recorded.py", "ours", "on", "--sync_check", "off")
    theirs = json.loads(record.read_text())["steps"]
    mine = [json.loads(line) for line in (ours / "logging.jsonl").read_text().splitlines()]
    mine = [step for step in mine if "loss" in step]
    assert len(mine) == len(theirs) == 4
    for step, stock in zip(mine, theirs, strict=True):
        assert step["loss"] == pytest.approx(stock["loss"], abs=tolerance)
        # The stock trainer logs the mean over micro batches of each one's token mean, which depends on how completions
        # fell into micro batches; ours is the mean over the step's tokens. The loss has the same KL in both.
        assert step["kl"] == pytest.approx(stock["kl"], rel=0.05, abs=tolerance)
        assert step["grad_norm"] == pytest.approx(stock["grad_norm"], rel=tolerance)
    assert any(abs(step["loss"]) > 1e-4 for step in mine) and mine[-1]["kl"] > 1e-4  # there was something to compare

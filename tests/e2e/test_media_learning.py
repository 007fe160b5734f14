"""Tiny models learn what an image, a recording or a video alone shows, and nothing if it is the same in all rows.

Accuracy is that of greedy answers to rows that were not trained. The learning rate and the number of steps were chosen
with other rows and other models than these.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.media_tasks import TASKS, make_learner
from tests.support.runs import PLUGINS, megatron_rlhf, read_json_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 30
FLAGS = ["--external_plugins", str(PLUGINS / "named_class.py"), "--reward_funcs", "named_class", "--torch_dtype",
         "float32", "--fp16", "false", "--seed_completions", "true", "--max_completion_length", "1",
         "--freeze_vit", "false", "--freeze_aligner", "false", "--num_generations", "8", "--global_batch_size", "128",
         "--micro_batch_size", "64", "--train_iters", str(STEPS), "--save_steps", str(STEPS + 1),
         "--lr_decay_style", "constant", "--lr_warmup_fraction", "0", "--eval_steps", str(STEPS),
         "--eval_temperature", "0", "--entropy_coef", "0.02"]  # fmt: skip
RATE = "1e-3"
MARGIN, SEED = 0.2, 7
ROWS = {"trained": 96, "held_out": 48}


def accuracy(folder: Path, name: str, blind: bool) -> float:
    """Train a model on the rows of a task, and return its accuracy on others."""
    task, rate = TASKS[name], ["--lr", RATE, "--vit_lr", RATE, "--aligner_lr", RATE]
    folder = folder / f"{name}-{blind}"
    folder.mkdir()
    model = make_learner(folder / "model", task.kind, SEED)
    train, held_out = (task.write_rows(folder / part, rows, part, blind) for part, rows in ROWS.items())
    flags = [*FLAGS, *rate, "--val_dataset", str(held_out)]
    run = megatron_rlhf(model, train, folder / "run", 1, flags, rewards=False)
    assert run.code == 0, run.output[-4000:]
    evaluations = [row for row in read_json_lines(run.folder / "logging.jsonl") if "eval_reward" in row]
    return float(evaluations[-1]["eval_reward"])


@pytest.mark.parametrize("name", TASKS)
def test_held_out_answers_need_what_the_policy_sees_or_hears(folder: Path, name: str) -> None:
    chance = TASKS[name].chance
    assert accuracy(folder, name, blind=False) > chance + MARGIN
    assert accuracy(folder, name, blind=True) <= chance + 1e-6  # which is logged in 32 bits

"""The files of a run: completions through the real writer, metrics with the names of a real log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_megatron_grpo.loop.completion_log import CompletionLog
from swift_megatron_grpo.settings.recording import CompletionLogging
from swift_megatron_grpo.types import Graded, Prompt, Rollout

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> <script>alert(1)</script> \u2028"
)
SETTINGS = {
    "model": "/models/tiny", "tuner_type": "full", "lr": 0.005, "beta": 0.04, "global_batch_size": 8,
    "tensor_model_parallel_size": 2, "data_parallel_size": 1, "reward_funcs": ["letters", "short"],
    "reward_weights": [1.0, 0.5], "vllm_server_api_key": "do-not-show", "output_dir": "somewhere",
}  # fmt: skip


def step_row(step: int, total: int) -> dict[str, Any]:
    return {
        "reward": 0.1 * step, "reward_std": 0.05, "completions/mean_length": 20.0 + step,
        "completions/max_length": 30.0, "completions/min_length": 10.0, "completions/clipped_ratio": 0.5 / step,
        "rewards/letters/mean": 0.1 * step,
        "rewards/short/mean": 0.2, "kl": 0.01 * step, "loss": 0.001 * step, "rollout/k3_kl": 1e-6 * step,
        "sync_check/mean_diff": 0.0008, "sync_check/max_diff": 0.003, "time/generation": 0.4, "time/train": 0.8,
        "grad_norm": 1.0 / step, "learning_rate": 0.005, "iteration": f"{step}/{total}", "elapsed_time": f"{step}s",
        "remaining_time": "9s", "memory(GiB)": 0.0, "train_speed(s/it)": 2.4,
    }  # fmt: skip


def write_log(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "logging.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_completions(folder: Path, rollouts: int, texts: list[str]) -> None:
    def write(rows: list[dict[str, Any]]) -> None:
        with (folder / "completions.jsonl").open("a") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    config = CompletionLogging(
        log_completions=True, output_dir=str(folder), report_to=[], wandb_log_unique_prompts=False
    )
    log = CompletionLog(config, ["letters", "short"], lambda tokens: f"prompt {tokens}", write, writes_here=True)
    for rollout in range(rollouts):
        graded = []
        for i, text in enumerate(texts):
            made = Rollout(Prompt("0-0", {"messages": []}), [i % 2], [2, 3], None, text, "length", rollout)
            graded.append(Graded(made, [0.1 * i, None if i else 0.5], 0.1 * i, 0.3))
        log.append(graded)


def make_run(folder: Path, steps: int = 6, total: int = 10, **settings: Any) -> Path:
    write_log(folder, [step_row(step, total) for step in range(1, steps + 1)])
    (folder / "args.json").write_text(json.dumps({**SETTINGS, **settings}))
    write_completions(folder, 3, ["first words of a text", HOSTILE, "other words of a text", "a fourth"])
    return folder

"""Train with TRL's GRPOTrainer: `python -m benchmarks.harness.learning.trl_arm FLAG...`, started by learn.py.

The flags are those of TRL's GRPOConfig and ModelConfig, and those of Arguments. Nothing that TRL computes is changed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.learning.prompts import read_rows
from benchmarks.harness.learning.reward import score
from swift_megatron_grpo.platforms import cpu


@dataclass
class Arguments:
    rows: str = field(metadata={"help": "train.jsonl"})
    kv_cache_memory_bytes: int = field(metadata={"help": "of vLLM"})
    enforce_eager: bool = field(default=False, metadata={"help": "vLLM without CUDA graphs and compilation"})


def train() -> None:
    import trl.generation.vllm_generation as generation
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
    from vllm import LLM

    config, model, arguments = TrlParser((GRPOConfig, ModelConfig, Arguments)).parse_args_and_config()
    of_engine = {"enforce_eager": arguments.enforce_eager, "kv_cache_memory_bytes": arguments.kv_cache_memory_bytes}
    vars(generation)["LLM"] = partial(LLM, **of_engine)
    config.model_init_kwargs = {"dtype": model.dtype}
    output = Path(config.output_dir)

    class Log(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **columns: Any) -> None:
            if state.global_step == 0:
                self.began = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **columns: Any) -> None:
            if "reward" in logs:
                row = {"reward": logs["reward"], "learning_rate": logs["learning_rate"],
                       "completions/mean_length": logs["completions/mean_length"],
                       "seconds": time.monotonic() - self.began}  # fmt: skip
                with (output / "steps.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def reward(completions: list[list[dict[str, str]]], solution: list[str], **columns: Any) -> list[float]:
        return [score(turns[0]["content"], right) for turns, right in zip(completions, solution, strict=True)]

    rows = [{"prompt": row["messages"], "solution": row["solution"]} for row in read_rows(Path(arguments.rows))]
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Log()],
    )
    trainer.train()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        cpu.activate()
    train()

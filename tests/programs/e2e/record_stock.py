"""An external plugin for ms-swift's own GRPO trainer: it records completions and the metrics of each step in a file.

It does not change what the trainer computes. RECORD names the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer
from swift.rlhf_trainers.utils import encode_sample

recorded: dict[str, list[Any]] = {"rollouts": [], "steps": []}
generate, train_step = MegatronGRPOTrainer._generate_completions, MegatronGRPOTrainer.train_step


def generate_and_record(self: Any, samples: list[Any]) -> list[Any]:
    samples = generate(self, samples)
    rollouts = []
    for sample in samples:
        with self._template_context(self.template):
            encoded = encode_sample(sample, self.template)
        prompt = [token for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True) if label == -100]
        completion = [token for token in encoded["labels"] if token != -100]
        rollouts.append({"prompt_ids": prompt, "completion_ids": completion, "finish_reason": sample.finish_reason,
                         "text": sample.messages[-1]["content"]})  # fmt: skip
    recorded["rollouts"].append(rollouts)
    return samples


def train_and_record(self: Any, data_iterator: Any) -> Any:
    metrics, grad_norm, updated = train_step(self, data_iterator)
    mean = {name: sum(float(m[name]) for m in metrics) / len(metrics) for name in ("loss", "kl") if name in metrics[0]}
    recorded["steps"].append({**mean, "grad_norm": float(grad_norm)})
    Path(os.environ["RECORD"]).write_text(json.dumps(recorded))
    return metrics, grad_norm, updated


MegatronGRPOTrainer._generate_completions = generate_and_record
MegatronGRPOTrainer.train_step = train_and_record

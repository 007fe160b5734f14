"""Save a whole model, or an adapter and the model merged with it, by the code of a run, with weights that no file has.

Each save has the log-probs of a fixed sequence, computed with these weights before it, in probe.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.tiny_models import save_tiny_model
from tests.programs.dist.engine_runs import make_trainer

TOKENS = [(7 * i) % 250 for i in range(1, 41)]
DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
STOP = {"eos_token_id": [257, 258], "pad_token_id": 256}  # config.json has 258 alone


def make_models(folders: dict[str, str]) -> None:
    """Write a tiny model of each type, with sampling defaults and several tokens that end a completion."""
    for model_type, folder in folders.items():
        path = save_tiny_model(Path(folder), model_type) / "generation_config.json"
        path.write_text(json.dumps(DEFAULTS | STOP, indent=2) + "\n")


def changed(weights: torch.Tensor) -> torch.Tensor:
    """Return other values for all weights, from each value alone: in the checkpoint they may be cut and transposed."""
    return weights * 1.02 + 0.002


def save(flags: list[str]) -> None:
    from swift.megatron.trainers.base import BaseMegatronTrainer

    from swift_megatron_grpo.types import Sample

    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    with torch.no_grad():
        for name, tensor in weights_to_change(trainer):
            if "lora_B" in name:
                tensor.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
            elif not trainer.args.has_adapter:
                tensor.copy_(changed(tensor))
    trainer.args.save_args()
    sample = Sample(tokens=TOKENS, completion_mask=[False] + [True] * (len(TOKENS) - 1), advantage=0.0)
    [first, *_] = engine.infer([sample] * 8).values()
    BaseMegatronTrainer.save_checkpoint(trainer)
    probe = {"tokens": TOKENS, "temperature": trainer.args.temperature, "logprobs": first.logprobs}
    for folder in Path(trainer.args.output_dir).glob("checkpoint-*"):
        (folder / "probe.json").write_text(json.dumps(probe))


def weights_to_change(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    [model] = trainer.unwrapped_models
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    return [*sorted(model.named_parameters()), *biases]

"""Make tiny models of text types, and compute log-probs and take one step of plain gradient descent in a layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer
from tests.support.text_types import save_text_type


def make_models(folder: str, types: list[str]) -> None:
    for model_type in types:
        save_text_type(Path(folder, model_type), model_type)


def run_layout(name: str, flags: list[str], folder: str) -> None:
    """Write log-probs and metrics to NAME.json, and the weights after the step, by the checkpoint's names, to NAME.pt.

    The samples are those of hf_gradients.py.
    """
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = make_trainer([*flags, *Variant.parse(name).flags()])
    engine = trainer.build_engine()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, seed=1, policies_given=True)
    logprobs = {index: values.logprobs for index, values in engine.infer(samples).items()}
    metrics = engine.train_step(samples, make_loss())
    exported = export_weights(trainer.bridge, trainer.unwrapped_models)
    weights = {tensor: values.clone().float().cpu() for tensor, values in exported}
    if torch.distributed.get_rank() == 0:
        Path(folder, f"{name}.json").write_text(json.dumps({"logprobs": logprobs, **metrics}))
        torch.save(weights, Path(folder, f"{name}.pt"))

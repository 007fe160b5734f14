"""Train an adapter with --use_rslora and --lora_dropout on two tensor-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer
from tests.programs.dist.lora_export import difference_to_peft


def main(out: str, flags: list[str]) -> None:
    from mcore_bridge import LoraParallelLinear

    from swift_megatron_grpo.training.upstream_fixes.adapter_settings import seed_adapter_dropout
    from swift_megatron_grpo.weights.export.export import adapter_config, export_weights

    trainer = make_trainer(flags)
    [model], engine, loss = trainer.unwrapped_models, trainer.build_engine(), make_loss()
    rank = torch.distributed.get_rank()
    plain = {n: t.clone() for n, t in trainer.bridge.export_weights([model])}
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    engine.optimizer.reload_model_params()
    sent = {n: t.clone() for n, t in export_weights(trainer.bridge, [model])}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraParallelLinear)}
    report: dict[str, Any] = {
        "config": adapter_config(model),
        "scalings": sorted({layer.scaling["default"] for layer in layers.values()}),
        "to_peft": difference_to_peft(trainer, sent, plain),
    }

    torch.manual_seed(rank)  # as vLLM, which leaves the default generators of ranks in different states
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    first, second = ({i: v.logprobs for i, v in engine.infer(samples).items()} for _ in range(2))
    report["inference_is_constant"] = first == second
    report["masks"] = {}
    for step in (7, 7, 8):
        seed_adapter_dropout(42, step)
        masks = {n: m.lora_dropout["default"](torch.ones(64)).tolist() for n, m in layers.items() if ".0." in n}
        report["masks"].setdefault(str(step), []).append(masks)
    losses = []
    for step in (7, 7, 8):
        seed_adapter_dropout(42, step)
        losses.append(engine.train_step(samples, loss)["loss"])
    report["losses"] = losses
    report["replicated"] = {
        name: parameter.double().sum().item()
        for name, parameter in model.named_parameters()
        if "lora_" in name and not parameter.tensor_model_parallel
    }
    Path(f"{out}.{rank}.json").write_text(json.dumps(report))

"""Export the weights twenty times on two ranks, each time with a new adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Flags(TorchFunctionMode):
    """Counts the tensors of booleans that are made on the GPU and on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"cuda": 0, "cpu": 0}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("dtype") is torch.bool:
            self.count[str(kwargs["device"])] += 1
        return func(*args, **kwargs)


def main(out: str, kind: str, flags: list[str]) -> None:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = MegatronRLHF(flags).prepare_trainer()
    [model] = trainer.unwrapped_models
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    plain = {n: t.clone() for n, t in trainer.bridge.export_weights([model])}
    torch.manual_seed(torch.distributed.get_rank() if kind == "moe" else 0)
    report: dict[str, Any] = {"worst": 0.0, "exports": 0, "base_tensors": len(base), "changed": []}
    for _ in range(20):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        with Flags() as flags_made:
            sent = {n: t.clone() for n, t in export_weights(trainer.bridge, [model])}
        report["flags"] = flags_made.count
        assert set(sent) == set(plain)
        assert any(not torch.equal(sent[n], plain[n]) for n in plain)
        if kind == "dense":
            report["worst"] = max(report["worst"], difference_to_peft(trainer, sent, plain))
        now = {n: p for n, p in model.named_parameters() if "lora_" not in n}
        report["changed"] += [n for n in base if not torch.equal(now[n], base[n])]
        report["exports"] += 1
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


def difference_to_peft(trainer: Any, sent: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    """Return the relative difference of sent weights to base + B A * alpha / r, in fp64, from the adapter as saved."""
    adapter = dict(trainer.bridge.export_weights(trainer.unwrapped_models, peft_format=True))
    rank = trainer.args.lora_rank
    scaling = trainer.args.lora_alpha / (rank**0.5 if trainer.args.use_rslora else rank)
    adapted, worst = set(), 0.0
    for name, a in adapter.items():
        if ".lora_A." not in name:
            continue
        target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        delta = adapter[name.replace(".lora_A.", ".lora_B.")].double() @ a.double() * scaling
        expected = plain[target].double() + delta
        worst = max(worst, ((sent[target].double() - expected).norm() / expected.norm()).item())
        adapted.add(target)
    assert len(adapted) == 4 * 7  # q, k, v, o, gate, up, down of every layer
    assert all(torch.equal(sent[n], plain[n]) for n in plain if n not in adapted)
    return worst

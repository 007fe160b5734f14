"""One step of a mixture of experts whose routers have an expert bias, at a learning rate that changes nothing."""

from __future__ import annotations

from typing import Any

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer, write_report


def main(out: str, flags: list[str]) -> None:
    trainer = make_trainer(flags)
    [model], engine = trainer.unwrapped_models, trainer.build_engine()

    def biases() -> dict[str, Any]:
        return {name: buffer.tolist() for name, buffer in model.named_buffers() if name.endswith("expert_bias")}

    before = biases()
    engine.train_step(fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True), make_loss())
    write_report(out, {"before": before, "after": biases()})

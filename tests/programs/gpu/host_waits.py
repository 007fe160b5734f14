"""A task for one rank with a GPU: the places at which the host waits for the GPU in forward and backward of a step."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import make_loss, make_trainer


def main(out: str, flags: list[str], counts: list[int]) -> None:
    """Write the waits of steps of as many micro batches as `counts` names, by source line."""
    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    waits = []
    for count in [max(counts), *counts]:  # the first step compiles kernels
        samples = fixed_samples(trainer.config.padded_vocab_size, count, policies_given=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            engine.train_step(samples, loss)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)))
    Path(f"{out}.json").write_text(json.dumps(waits[1:]))

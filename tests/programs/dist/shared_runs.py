"""Training with prompts that completions share, on the ranks that tests/dist/conftest.py starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.packing.segments import lay_out
from swift_megatron_grpo.types import Sample
from tests.programs.dist.engine_runs import make_loss, make_trainer


def samples_of_step(vocabulary: int, seed: int) -> list[Sample]:
    """Return groups of four with one prompt each; one completion is not trained, and one prompt is another."""
    samples = fixed_samples(vocabulary, 8, seed=seed, one_prompt=True)
    samples[1].completion_mask = [False] * len(samples[1].tokens)
    samples[7].tokens[1] = (samples[7].tokens[1] + 1) % (vocabulary // 2)
    return samples


def run_layout(name: str, flags: list[str], folder: str) -> None:
    """Train twice on the policy that generated and once off it; count packed tokens, and record experts."""
    from swift_megatron_grpo.training.trained_weights import gather_parameters
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = make_trainer([*flags, *Variant.parse(name).flags()])
    engine, loss, config = trainer.build_engine(), make_loss(), trainer.config
    metrics, tokens, rows = [], 0, {}
    for number in (1, 2, 3):
        samples = samples_of_step(config.padded_vocab_size, number)
        for index, values in engine.infer(samples).items():
            samples[index].ref_logprobs = values.logprobs
            # In the first step, this is the policy that is trained.
            samples[index].old_logprobs = values.logprobs
        if number == 3:
            samples = give_policies(samples)
        tokens += packed_tokens(engine, samples)
        metrics.append(engine.train_step(samples, loss))
    if config.num_moe_experts is not None:
        _, rows = engine.infer_and_record(samples_of_step(config.padded_vocab_size, 1))
    gather_parameters(trainer.wrapped_models)
    weights = {
        key: tensor.clone().float().cpu() for key, tensor in export_weights(trainer.bridge, trainer.unwrapped_models)
    }
    rank = torch.distributed.get_rank()
    torch.save(
        {index: torch.from_numpy(value) for index, value in rows.items()}, Path(folder, f"{name}.rows.{rank}.pt")
    )
    Path(folder, f"{name}.tokens.{rank}").write_text(str(tokens))
    if rank == 0:
        path = str(Path(folder, f"{name}.pt"))
        torch.save(weights, path)
        report = {"layout": name, "metrics": metrics, "weights": path, "seconds": 0.0}
        Path(folder, f"{name}.json").write_text(json.dumps(report))


def give_policies(samples: list[Sample]) -> list[Sample]:
    """Give every sample an old policy that is away from the trained one."""
    for number, sample in enumerate(samples):
        if sample.old_logprobs:  # those of other data-parallel ranks have none here
            generator = torch.Generator().manual_seed(number)
            noise = torch.randn(len(sample.old_logprobs), generator=generator)
            sample.old_logprobs = [old + 0.3 * n for old, n in zip(sample.old_logprobs, noise.tolist(), strict=True)]
    return samples


def packed_tokens(engine: Any, samples: list[Sample]) -> int:
    """Return the tokens that this rank trains, without padding."""
    plan = engine.passes.plan(samples)
    layouts = [
        lay_out([samples[i] for i in batch], engine.passes._align, plan.share_prompts)
        for batch in plan.assignment[engine.parallel.dp_rank]
    ]
    return sum(segment.end - segment.begin for layout in layouts for segment in layout.segments)

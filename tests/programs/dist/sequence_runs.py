"""Training on completions of several sequences, on the ranks that tests/dist/conftest.py starts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.layouts import Variant
from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.types import Sample
from tests.programs.dist.engine_runs import make_loss, make_trainer
from tests.programs.dist.shared_runs import packed_tokens


def samples_of_step(vocabulary: int, seed: int, whole: bool) -> list[Sample]:
    """Return two groups of conversations with given policies; each third token of an answer is a tool's.

    The first group only appends to its conversations, which are one sequence each if `whole`, else one for each of two
    turns. In the second group the context of the second turn is another one, so that there are two sequences anyway.
    Half of the conversations of a group begin with the same 40 tokens, most of which each of them trains: they are
    branches of one tree.
    """
    sequences = []
    for number, sample in enumerate(fixed_samples(vocabulary, 8, seed, policies_given=True, one_prompt=True)):
        if number % 4 >= 2:
            sample = _behind_a_branch(sample, vocabulary, seed)
        begin = sample.completion_mask.index(True)
        trained = [place for place in range(begin, len(sample.tokens)) if (place - begin) % 3 != 2]
        cut = begin + (len(sample.tokens) - begin) // 2  # behind the first turn
        turns = [[place for place in trained if place < cut], [place for place in trained if place >= cut]]
        appends = number < 4
        if cut == begin or (whole and appends):
            sequences.append(_sequence(sample, number, len(sample.tokens), trained, begin))
            continue
        first, second = (
            _sequence(sample, number, end, places, begin)
            for end, places in zip((cut, len(sample.tokens)), turns, strict=True)
        )
        if not appends:
            tokens = list(second.tokens)
            tokens[begin] = (tokens[begin] + 1) % (vocabulary // 2)
            second = replace(second, tokens=tokens)
        sequences += [first, second]
    return sequences


def _behind_a_branch(sample: Sample, vocabulary: int, seed: int) -> Sample:
    """Return the sample with an answer that begins with tokens of others of its group."""
    assert sample.old_logprobs is not None and sample.ref_logprobs is not None
    rng, begin = random.Random(f"{seed} {sample.group}"), sample.completion_mask.index(True)
    branch = [rng.randrange(vocabulary // 2) for _ in range(40)]
    policies = [[-math.log(vocabulary) + rng.gauss(0, 0.3) for _ in branch] for _ in range(2)]
    return replace(
        sample, tokens=sample.tokens[:begin] + branch + sample.tokens[begin:],
        completion_mask=sample.completion_mask + [True] * len(branch),
        old_logprobs=policies[0] + sample.old_logprobs, ref_logprobs=policies[1] + sample.ref_logprobs,
    )  # fmt: skip


def _sequence(sample: Sample, number: int, end: int, trained: list[int], begin: int) -> Sample:
    """Return the first `end` tokens, of which some are trained, with their log-probs of other policies."""
    assert sample.old_logprobs is not None and sample.ref_logprobs is not None
    old, ref = sample.old_logprobs, sample.ref_logprobs
    return replace(
        sample, completion=number, tokens=sample.tokens[:end], completion_mask=[i in trained for i in range(end)],
        old_logprobs=[old[i - begin] for i in trained], ref_logprobs=[ref[i - begin] for i in trained],
    )  # fmt: skip


def run_layout(name: str, flags: list[str], folder: str) -> None:
    """Train once on the policy that generated and once off it; `one` trains whole conversations."""
    from swift_megatron_grpo.training.trained_weights import gather_parameters
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = make_trainer([*flags, *Variant.parse(name).flags()])
    engine, loss, vocabulary = trainer.build_engine(), make_loss(), trainer.config.padded_vocab_size
    on_policy, off_policy = (samples_of_step(vocabulary, seed, whole=name == "one") for seed in (1, 2))
    on_policy = [replace(sample, old_logprobs=None) for sample in on_policy]
    steps = [engine.train_step(samples, loss) for samples in (on_policy, off_policy)]
    # the extremes are of sequences, and a conversation is one or two
    metrics = [{name: value for name, value in step.items() if not name.endswith(("_min", "_max"))} for step in steps]
    values = engine.infer(off_policy)
    gather_parameters(trainer.wrapped_models)
    exported = export_weights(trainer.bridge, trainer.unwrapped_models)
    weights: dict[str, Any] = {key: tensor.clone().float().cpu() for key, tensor in exported}
    rank = torch.distributed.get_rank()
    Path(folder, f"{name}.counts.{rank}").write_text(json.dumps({i: len(v.logprobs) for i, v in values.items()}))
    if rank == 0:
        path = str(Path(folder, f"{name}.pt"))
        torch.save(weights, path)
        report = {"layout": name, "metrics": metrics, "weights": path, "seconds": 0.0}
        report |= {"sequences": len(off_policy), "rate_steps": trainer.opt_param_scheduler.num_steps}
        report |= {"packed": packed_tokens(engine, off_policy), "tokens": sum(s.length for s in off_policy)}
        Path(folder, f"{name}.json").write_text(json.dumps(report))


def descent(flags: list[str], folder: str) -> None:
    """Take one step of plain gradient descent on whole conversations cut into sequences."""
    from swift_megatron_grpo.weights.export.export import export_weights

    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    samples = samples_of_step(trainer.config.padded_vocab_size, 1, whole=False)
    logprobs = [engine.infer(samples)[i].logprobs for i in range(len(samples))]
    metrics = [engine.train_step(samples, make_loss())]
    weights = {
        key: tensor.clone().float().cpu() for key, tensor in export_weights(trainer.bridge, trainer.unwrapped_models)
    }
    path = str(Path(folder, "sequences.pt"))
    torch.save(weights, path)
    report = {"metrics": metrics, "weights": path, "logprobs": logprobs}
    Path(folder, "sequences.json").write_text(json.dumps(report))

"""Run steps and log-prob passes in which micro batches above a number of tokens do not fit the memory of one rank."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.training.memory.out_of_memory import PeerOutOfMemory
from tests.programs.dist.engine_runs import make_loss, make_trainer


def main(out: str, flags: list[str], fits: int, in_backward: bool, own: bool = False) -> None:
    """`own`: as in a run, a rank has the log-probs of the other policies for the samples that it trains alone."""
    trainer = make_trainer(flags)
    engine, messages = trainer.build_engine(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("swift_megatron_grpo").addHandler(handler)
    rank = torch.distributed.get_rank()
    if rank == 1:
        limit_memory(trainer.unwrapped_models[0].decoder, fits, in_backward)
    samples = fixed_samples(trainer.config.padded_vocab_size, 32 if own else 8, policies_given=True, one_prompt=own)
    if own:
        trained = engine.passes.plan(samples).samples_of_ranks()[rank]
        for sample in (sample for index, sample in enumerate(samples) if index not in trained):
            sample.old_logprobs = sample.ref_logprobs = None
    report: dict[str, Any] = {"tokens_of_experts": []}
    # The package has a function of the module's name.
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    updated_bias = finalize_model_grads.get_updated_expert_bias

    def count(tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # [layers, experts]
        bias = updated_bias(tokens, *args, **options)  # which sums the tokens of all ranks in place
        report["tokens_of_experts"].append(tokens.tolist())
        return bias

    try:
        with replaced(finalize_model_grads, "get_updated_expert_bias", count):
            report["steps"] = [engine.train_step(samples, make_loss()) for _ in range(2)]
        report["values"] = {index: value.logprobs for index, value in engine.infer(samples).items()}
    except (torch.OutOfMemoryError, PeerOutOfMemory) as error:
        report["error"] = str(error)
    logging.getLogger("swift_megatron_grpo").removeHandler(handler)
    weights = trainer.unwrapped_models[0].parameters()
    report["weights"] = sum(weight.double().abs().sum().item() for weight in weights)
    settings = engine.passes.settings
    report |= {"budgets": [settings.max_tokens, settings.infer_max_tokens], "messages": messages}
    Path(f"{out}.{rank}.json").write_text(json.dumps(report))


def limit_memory(decoder: torch.nn.Module, fits: int, in_backward: bool) -> None:
    """Raise what torch raises when it cannot allocate, for a micro batch of more tokens than `fits`."""

    def check(tokens: int) -> None:
        if tokens > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def on_output(module: Any, inputs: Any, output: torch.Tensor) -> None:  # [tokens, 1, hidden]
        tokens = output.shape[0]
        if in_backward and output.requires_grad:
            output.register_hook(lambda gradient: check(tokens))
        else:
            check(tokens)

    decoder.register_forward_hook(on_output)

"""What the engine does with unusual batches, on the ranks that tests/dist/conftest.py starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.tools.check_layouts import fixed_samples, make_batches

Told = dict[str, Any]


def make_trainer(flags: list[str]) -> Any:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_model_training()
    return trainer


def make_loss() -> Any:
    from swift_megatron_grpo.config import LossConfig
    from swift_megatron_grpo.training import loss

    return loss.make_loss(LossConfig(name="grpo", epsilon_low=0.2, epsilon_high=0.28, beta=0.1, temperature=0.9))


def tell(out: str, told: Told) -> None:
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(told))


def threads(out: str) -> None:
    tell(out, {"threads": len(list(Path("/proc/self/task").iterdir()))})


def golden(out: str, flags: list[str]) -> None:
    """Ten steps on ten fixed batches, on-policy and off-policy in turn."""
    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    batches = make_batches(["on-policy", "off-policy"] * 5, engine, trainer.config.padded_vocab_size)
    tell(out, {"steps": [engine.train_step(samples, loss) for samples in batches]})


def inference(out: str, flags: list[str], others: list[dict[str, int]]) -> None:
    """Log-probs and entropies in micro batches as in training, and of other sizes."""
    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    told: Told = {"lengths": [sum(sample.completion_mask) for sample in samples], "passes": []}
    for other in [{}, *others]:
        engine.passes.settings = replace(engine.passes.settings, **other)
        values = engine.infer(samples, outputs=("logprob", "entropy"))
        told["passes"].append({index: [v.logprobs, v.entropies] for index, v in values.items()})
    told["without_entropy"] = [v.entropies for v in engine.infer(samples).values()]
    tell(out, told)


def one_step(out: str, flags: list[str]) -> None:
    """Log-probs, entropies and a step of one given batch: what kernels of another kind are compared with."""
    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    values = engine.infer(samples, outputs=("logprob", "entropy"))
    metrics = engine.train_step(samples, make_loss())
    tell(out, {"values": {index: [v.logprobs, v.entropies] for index, v in values.items()}, "metrics": metrics})


def odd_batches(out: str, flags: list[str]) -> None:
    """Right results or errors that say what is wrong; the engine goes on afterwards. The learning rate is 0."""
    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    vocab = trainer.config.padded_vocab_size
    told: Told = {}

    samples = fixed_samples(vocab, 8, policies_given=True)
    for sample in samples[2:4]:  # a whole micro batch of one of the two data-parallel ranks
        sample.tokens = sample.tokens[: sample.completion_mask.count(False)]
        sample.completion_mask = [False] * len(sample.tokens)
        sample.old_logprobs, sample.ref_logprobs = [], []
    told["empty"] = engine.train_step(samples, loss)
    settings, engine.passes.settings = engine.passes.settings, replace(engine.passes.settings, max_tokens=1000)
    told["without"] = engine.train_step(samples[:2] + samples[4:], loss)
    engine.passes.settings = settings

    samples = fixed_samples(vocab, 8, policies_given=True)
    for sample in samples:
        prompt = sample.completion_mask.count(False)
        sample.tokens, sample.completion_mask = sample.tokens[: prompt + 1], sample.completion_mask[: prompt + 1]
        sample.old_logprobs, sample.ref_logprobs = sample.old_logprobs[:1], sample.ref_logprobs[:1]
    told["length_one"] = engine.train_step(samples, loss)

    samples = fixed_samples(vocab, 8, policies_given=True)
    told["too_few"] = error_of(lambda: engine.train_step(samples[:1], loss))
    told["none"] = error_of(lambda: engine.train_step([], loss))
    told["outputs"] = error_of(lambda: engine.train_step(samples, loss, outputs=("entropy",)))

    def per_token(batch: Any, output: Any) -> Any:
        return -output.logprobs, {}

    def plain_metric(batch: Any, output: Any) -> Any:
        return loss(batch, output)[0], {"kl": 0.5}

    told["shape"] = error_of(lambda: engine.train_step(samples, per_token))
    told["metric"] = error_of(lambda: engine.train_step(samples, plain_metric))
    told["after"] = engine.train_step(samples, loss)
    tell(out, told)


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reference(out: str, flags: list[str]) -> None:
    """The frozen copy in its own layout, before a training step and after it, and the model in training before it."""
    from datetime import timedelta

    from swift_megatron_grpo.parallel import Coordinator

    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    frozen = trainer.build_reference(engine, Coordinator(timedelta(minutes=5)))
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    told: Told = {"trained": {index: v.logprobs for index, v in engine.infer(samples).items()}}
    told["before"] = {index: v.logprobs for index, v in frozen.infer(samples).items()}
    told["step"] = engine.train_step(samples, make_loss())
    told["after"] = {index: v.logprobs for index, v in frozen.infer(samples).items()}
    tell(out, told)


def quiet(out: str, flags: list[str]) -> None:
    """How often a step reads a value from the device or meets other ranks, with two micro batches and with eight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = meetings = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.reads += "_local_scalar_dense" in str(function)
            self.meetings += "c10d" in str(function)
            return function(*args, **(kwargs or {}))

    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    told: Told = {}
    for size in (4, 1):
        engine.passes.settings = replace(engine.passes.settings, micro_batch_size=size)
        with Count() as count:
            engine.train_step(samples, loss, outputs=("logprob", "entropy"))
        told[str(8 // size)] = [count.reads, count.meetings]
    tell(out, told)

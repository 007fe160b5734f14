"""Runs of the engine, also on unusual batches, on the ranks that tests/dist/conftest.py starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples, make_batches

Report = dict[str, Any]


def make_trainer(flags: list[str]) -> Any:
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    trainer = MegatronRLHF(flags).prepare_trainer()
    trainer.setup_model_training()
    return trainer


def make_loss() -> Any:
    from swift_megatron_grpo.settings.losses import LossConfig
    from swift_megatron_grpo.training import loss

    return loss.make_loss(LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1))


def write_report(out: str, report: Report) -> None:
    Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


def threads(out: str) -> None:
    """Count the threads of this process."""
    write_report(out, {"threads": len(list(Path("/proc/self/task").iterdir()))})


def golden(out: str, flags: list[str]) -> None:
    """Run ten steps on ten fixed batches, alternately on-policy and off-policy."""
    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    batches = make_batches(["on-policy", "off-policy"] * 5, engine, trainer.config.padded_vocab_size)
    write_report(out, {"steps": [engine.train_step(samples, loss) for samples in batches]})


def inference(out: str, flags: list[str], others: list[dict[str, int]]) -> None:
    """Compute log-probs and entropies in micro batches of the training size and of other sizes."""
    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    report: Report = {"lengths": [sum(sample.completion_mask) for sample in samples], "passes": []}
    for sizes in [{}, *others]:
        engine.passes.settings = replace(engine.passes.settings, **sizes)
        values = engine.infer(samples, outputs=("logprob", "entropy"))
        report["passes"].append({index: [v.logprobs, v.entropies] for index, v in values.items()})
    report["without_entropy"] = [v.entropies for v in engine.infer(samples).values()]
    write_report(out, report)


def one_step(out: str, flags: list[str]) -> None:
    """Compute log-probs, entropies and one step of a given batch, to compare other kernels with."""
    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    values = engine.infer(samples, outputs=("logprob", "entropy"))
    metrics = engine.train_step(samples, make_loss())
    weights = [model.named_parameters() for model in trainer.unwrapped_models]
    in_layers = sum(w.numel() for named in weights for name, w in named if "layers" in name and w.ndim == 2)
    head = trainer.config.hidden_size * trainer.config.padded_vocab_size
    products = in_layers * sum(len(s.tokens) for s in samples) + head * sum(sum(s.completion_mask) for s in samples)
    flops = {"flops": engine.flops_of_last_step, "products": products}
    values_of = {index: [v.logprobs, v.entropies] for index, v in values.items()}
    write_report(out, {"values": values_of, "metrics": metrics, **flops})


def odd_batches(out: str, flags: list[str]) -> None:
    """Train on unusual batches and record results or errors; the engine works afterwards. The rate is 1e-30."""
    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    vocab = trainer.config.padded_vocab_size
    report: Report = {}

    samples = fixed_samples(vocab, 8, policies_given=True)
    for sample in samples[2:4]:  # a whole micro batch of one of the two data-parallel ranks
        sample.tokens = sample.tokens[: sample.completion_mask.count(False)]
        sample.completion_mask = [False] * len(sample.tokens)
        sample.old_logprobs, sample.ref_logprobs = [], []
    report["empty"] = engine.train_step(samples, loss)
    settings, engine.passes.settings = engine.passes.settings, replace(engine.passes.settings, max_tokens=1000)
    report["without"] = engine.train_step(samples[:2] + samples[4:], loss)
    engine.passes.settings = settings

    samples = fixed_samples(vocab, 8, policies_given=True)
    for sample in samples:
        prompt = sample.completion_mask.count(False)
        sample.tokens, sample.completion_mask = sample.tokens[: prompt + 1], sample.completion_mask[: prompt + 1]
        sample.old_logprobs, sample.ref_logprobs = sample.old_logprobs[:1], sample.ref_logprobs[:1]
    report["length_one"] = engine.train_step(samples, loss)

    samples = fixed_samples(vocab, 8, policies_given=True)
    report["too_few"] = error_of(lambda: engine.train_step(samples[:1], loss))
    report["none"] = error_of(lambda: engine.train_step([], loss))
    report["outputs"] = error_of(lambda: engine.train_step(samples, loss, outputs=("entropy",)))

    def per_token(batch: Any, output: Any) -> Any:
        return -output.logprobs, {}

    def plain_metric(batch: Any, output: Any) -> Any:
        return loss(batch, output)[0], {"kl": 0.5}

    report["shape"] = error_of(lambda: engine.train_step(samples, per_token))
    report["metric"] = error_of(lambda: engine.train_step(samples, plain_metric))
    report["after"] = engine.train_step(samples, loss)
    write_report(out, report)


def no_tokens(out: str, flags: list[str]) -> None:
    """Train on prompts alone."""
    trainer = make_trainer(flags)
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    for sample in samples:
        sample.completion_mask = [False] * len(sample.tokens)
        sample.old_logprobs, sample.ref_logprobs = [], []
    write_report(out, trainer.build_engine().train_step(samples, make_loss()))


def error_of(call: Callable[[], object]) -> str:
    """Return type and message of the error that the call raises, or an empty string."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make_reference(trainer: Any, engine: Any) -> Any:
    """Return the reference policy of a trainer's run."""
    from swift_megatron_grpo.loop.assemble import reference_policy

    return reference_policy(trainer.settings, trainer.loaded_models(), engine, trainer.coordinator)


def reference(out: str, flags: list[str]) -> None:
    """Run the frozen copy in its own layout before and after a training step, and the trained model before it."""
    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    frozen = make_reference(trainer, engine)
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    report: Report = {"trained": {index: v.logprobs for index, v in engine.infer(samples).items()}}
    report["before"] = {index: v.logprobs for index, v in frozen.infer(samples).items()}
    report["step"] = engine.train_step(samples, make_loss())
    report["after"] = {index: v.logprobs for index, v in frozen.infer(samples).items()}
    write_report(out, report)


def synchronizations(out: str, flags: list[str]) -> None:
    """Count device reads and collective calls of a step, with two micro batches and with eight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = collectives = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.reads += "_local_scalar_dense" in str(function)
            self.collectives += "c10d" in str(function)
            return function(*args, **(kwargs or {}))

    trainer = make_trainer(flags)
    engine, loss = trainer.build_engine(), make_loss()
    samples = fixed_samples(trainer.config.padded_vocab_size, 8, policies_given=True)
    report: Report = {}
    for size in (4, 4, 1):  # the first step of megatron-core 0.19 has one more of each, whatever its size
        engine.passes.settings = replace(engine.passes.settings, micro_batch_size=size)
        with Count() as count:
            engine.train_step(samples, loss, outputs=("logprob", "entropy"))
        report[str(8 // size)] = [count.reads, count.collectives]
    write_report(out, report)

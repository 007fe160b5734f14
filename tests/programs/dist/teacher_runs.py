"""Two steps with a teacher of another shape, in a layout of the trained model."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.engine_runs import Report, make_loss, make_trainer, write_report


def steps_with_second_prompts(out: str, flags: list[str]) -> None:
    """Put other prompts of other lengths before the completions that the teacher reads."""
    steps(out, flags, second_prompts=True)


def steps(out: str, flags: list[str], second_prompts: bool = False) -> None:
    from swift_megatron_grpo.loop.assemble import teacher_policy
    from swift_megatron_grpo.loop.step_context import PhaseTimer, StepContext
    from swift_megatron_grpo.loop.training_batches import TrainingBatches

    trainer = make_trainer(flags)
    engine = trainer.build_engine()
    settings = trainer.settings
    settings = replace(settings, teacher=replace(settings.teacher, teacher_prompts=second_prompts))
    teacher = teacher_policy(settings, trainer.loaded_models(), engine, trainer.coordinator)
    stages: Any = SimpleNamespace(training=engine, teacher=teacher, residency=SimpleNamespace(for_teacher=lambda: None))
    batches = [fixed_samples(trainer.config.padded_vocab_size, 8, seed) for seed in (1, 2)]
    for number, sample in enumerate(chain.from_iterable(batches) if second_prompts else ()):
        first = sample.completion_mask.index(True)  # the teacher's prompt may be shorter, and has at least one token
        sample.teacher_tokens = [3 + number] * (5 * number % 23) + sample.tokens[first // 2 :]
    TrainingBatches(settings, stages, 0)._add_other_policies(batches, False, StepContext(0, PhaseTimer()))
    report: Report = {"steps": [engine.train_step(samples, make_loss()) for samples in batches]}
    write_report(out, report)

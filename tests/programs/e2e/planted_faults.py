"""An external plugin for the test of learning: plants the fault that PLANTED names, for the whole run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

import swift_megatron_grpo.loop.step as step
from swift_megatron_grpo.grading.graded import GradedRollouts
from swift_megatron_grpo.settings.config import GradingConfig
from swift_megatron_grpo.settings.losses import LossConfig
from swift_megatron_grpo.training.loss import policies
from swift_megatron_grpo.training.loss.terms import Metrics, Terms
from swift_megatron_grpo.training.loss.total import LOSSES
from swift_megatron_grpo.weights.export.export import WeightExport

add_advantages = step.add_advantages
export = WeightExport.__call__
shuffler = random.Random(0)  # every rank has all completions, in the same order
sent: list[tuple[str, torch.Tensor]] = []


def with_wrong_sign(terms: Terms, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    per_token, metrics = policies.clipped(terms, config)
    return -per_token, metrics


def of_other_completions(graded: GradedRollouts, config: GradingConfig) -> GradedRollouts:
    result = add_advantages(graded, config)
    advantages = result.advantages.tolist()
    shuffler.shuffle(advantages)
    return result.with_advantages(np.array(advantages))


def of_the_first_sync(self: WeightExport) -> Iterator[tuple[str, torch.Tensor]]:
    if not sent:
        sent.extend((name, tensor.clone()) for name, tensor in export(self))
    return iter(sent)


match os.environ["PLANTED"]:
    case "negated loss":
        LOSSES["grpo"] = replace(LOSSES["grpo"], policy=with_wrong_sign)
    case "shuffled advantages":
        step.add_advantages = of_other_completions
    case "stale weights":
        WeightExport.__call__ = of_the_first_sync  # type: ignore[method-assign]

"""An external plugin for tests: vLLM on a CPU loses its weights in a sleep, and drafts are treated as PLANTED says.

rule: every draft is accepted. states: linear attention continues from the state behind the last draft, right or wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import swift_megatron_grpo.loop.assemble
from swift_megatron_grpo.generation.local.engine import _ASLEEP, LocalVllm
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS
from swift_megatron_grpo.generation.vllm import position_noise
from swift_megatron_grpo.platforms.cpu.linear_attention import vllm_core
from tests.programs.e2e.speculation import always_accepted


class DiscardingVllm(LocalVllm):
    """Sleeps at level 2, as on a GPU: no weight is left of the model and of what predicts its drafts."""

    memory_to_wake = 0

    def sleep(self) -> None:
        if not self._asleep:
            self._reset_prefix_cache()
            for weight in self._model.parameters():
                weight.data.fill_(torch.nan)
            self._asleep, self._weights_version = _ASLEEP, NO_WEIGHTS

    def _wake(self, tag: str) -> None:
        self._asleep -= {tag}


swift_megatron_grpo.loop.assemble.LocalVllm = DiscardingVllm
planted = os.environ.get("PLANTED")
requests_of = vllm_core._requests_of


def requests_behind_all_drafts(metadata: Any) -> Iterator[Any]:
    for request in requests_of(metadata):
        drafted = len(request.slots) > 1
        yield replace(request, state=request.slots[-1], accepted=len(request.slots)) if drafted else request


if planted == "rule":
    position_noise.accepted = always_accepted
if planted == "states":
    vllm_core._requests_of = requests_behind_all_drafts

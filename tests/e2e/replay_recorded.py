"""An external plugin for this package's trainer: completions come from a file, named by RECORD, instead of vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import swift_megatron_grpo.trainer
from swift_megatron_grpo.config import SamplingConfig
from swift_megatron_grpo.generation.engine import NamedWeights, Share
from swift_megatron_grpo.holdings import Holding
from swift_megatron_grpo.types import Prompt, Rollout


class RecordedCompletions:
    """A GenerationEngine of one rank. Weights are taken and dropped, so exporting them is part of the run."""

    share = Share(index=0, of=1, speaks=True)
    memory_to_wake = 0

    def __init__(self, *_: Any) -> None:
        self.weights_version = -1
        self._rollouts = iter(json.loads(Path(os.environ["RECORD"]).read_text())["rollouts"])

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        rows = next(self._rollouts)
        return [
            Rollout(prompt=prompt, logprobs=None, weights_version=self.weights_version, **row)
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def load_weights(self, weights: NamedWeights, version: int, accounted: bool = False) -> None:
        assert sum(1 for _ in weights) > 0
        self.weights_version = version

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def score(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        raise NotImplementedError("no model runs here: --sync_check off")

    def holdings(self) -> list[Holding]:
        raise NotImplementedError("no model runs here: --sync_check off")

    def sleep(self) -> None: ...

    def shutdown(self) -> None: ...


swift_megatron_grpo.trainer.LocalVllm = RecordedCompletions

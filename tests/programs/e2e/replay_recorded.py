"""An external plugin for this package's trainer: completions come from a file, named by RECORD, instead of vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import swift_megatron_grpo.loop.assemble
from swift_megatron_grpo.generation.interface import (
    AdapterConfig,
    AnsweredRequest,
    BatchGeneration,
    Generation,
    NamedWeights,
    Request,
    Share,
)
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.types import DraftCounts, Rollout, ScoredText
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights


class RecordedCompletions:
    """A GenerationEngine of one rank. It receives and discards weights, so exporting them is part of the run."""

    share = Share(index=0, of=1, reports=True)
    memory_to_wake = 0
    is_new = False
    lacks_base = False
    held_media = frozenset[str]()
    drafts = None

    def __init__(self, *_: Any) -> None:
        self.weights_version = -1
        self._rollouts = iter(json.loads(Path(os.environ["RECORD"]).read_text())["rollouts"])

    def needs_weights(self, version: int) -> bool:
        return self.weights_version != version

    def mark_verified(self) -> None: ...

    def invalidate_weights(self) -> None: ...

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        return BatchGeneration(lambda: self._recorded(requests))

    def _recorded(self, requests: Sequence[Request]) -> dict[int, Rollout]:
        rows = next(self._rollouts)
        return {
            request.index: Rollout(request.prompt, logprobs=None, weights_version=self.weights_version, **row)
            for request, row in zip(requests, rows, strict=True)
        }

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
        assert sum(1 for _ in weights) > 0
        self.weights_version = version

    def load_base(self, weights: NamedWeights) -> None:
        raise NotImplementedError("no model runs here")

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...

    def start_scoring(self, text: ScoredText) -> Callable[[], dict[str, list[float]]]:
        raise NotImplementedError("no model runs here: --sync_check off")

    def held_weights(self) -> list[WorkerWeights]:
        raise NotImplementedError("no model runs here: --sync_check off")

    def sleep(self) -> None: ...

    def answered_requests(self) -> list[AnsweredRequest]:
        return []

    def take_draft_counts(self) -> DraftCounts:
        return DraftCounts()

    def shutdown(self) -> None: ...


swift_megatron_grpo.loop.assemble.LocalVllm = RecordedCompletions

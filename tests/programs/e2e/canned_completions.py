"""An external plugin: completions come from seeded random numbers, not from vLLM, whose start takes most of a test."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
from swift_megatron_grpo.types import DraftCounts, Prompt, Rollout, ScoredText
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights


class CannedCompletions:
    """A GenerationEngine on every rank."""

    memory_to_wake = 2**30  # makes the trainer offload where small_gpu.py reports no free memory
    is_new = False
    lacks_base = False
    held_media = frozenset[str]()
    drafts = None

    def __init__(self, *_: Any) -> None:
        self.weights_version = -1
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.share = Share(index=rank, of=world_size, reports=True)
        self._random = random.Random(rank)

    def needs_weights(self, version: int) -> bool:
        return self.weights_version != version

    def mark_verified(self) -> None: ...

    def invalidate_weights(self) -> None: ...

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        longest = sampling.max_completion_length
        return BatchGeneration(lambda: {request.index: self._complete(request.prompt, longest) for request in requests})

    def _complete(self, prompt: Prompt, longest: int) -> Rollout:
        tokens = [self._random.randrange(97, 123) for _ in range(self._random.randint(1, longest))]
        text = bytes(tokens).decode()
        # Near the uniform distribution of the random model, but less near than a real engine with its weights.
        logprobs = [self._random.gauss(-5.56, 0.1) for _ in tokens]
        reason = "length" if len(tokens) > longest * 3 // 4 else "stop"
        return Rollout(prompt, [1, 2, 3], tokens, logprobs, text, reason, self.weights_version)

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


swift_megatron_grpo.loop.assemble.LocalVllm = CannedCompletions

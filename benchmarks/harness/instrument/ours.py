"""Phases of a step in this package's trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from swift.infer_engine import GRPOVllmEngine  # noqa: F401  # vLLM is imported in both arms
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.utils import encode_sample
from swift.template import Template

import swift_megatron_grpo.loop.assemble
from benchmarks.harness.instrument.clock import REST, Clock
from benchmarks.harness.job import Job
from benchmarks.harness.workload import row_of
from swift_megatron_grpo.generation.interface import (
    AdapterConfig,
    AnsweredRequest,
    BatchGeneration,
    Generation,
    Request,
    Share,
)
from swift_megatron_grpo.generation.local import engine as local_engine
from swift_megatron_grpo.generation.local.engine import LocalVllm
from swift_megatron_grpo.loop import step as loop
from swift_megatron_grpo.loop.step_context import PhaseTimer
from swift_megatron_grpo.packing.outlines import Outline
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.config import SamplingConfig, VllmConfig
from swift_megatron_grpo.trainer.grpo_trainer import MegatronGRPOTrainer
from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.types import DraftCounts, Prompt, Rollout, Sample, ScoredText
from swift_megatron_grpo.weights.transport.buckets import NamedWeights
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights

# Phases of the loop's own timer. With vLLM in the training processes, its weight_sync and generation also include
# wake-up, offload and sleep, which count as `switch`. Loading the weights and generating, inside vLLM, are separate
# phases of the clock.
PHASE_OF_TIMER = {
    "phase_switch": "switch",
    "weight_sync": "switch",
    "sync_check": "switch",
    "generation": "switch",
    "grading": "grading",
    "old_logprobs": "logprobs",
    "ref_logprobs": "logprobs",
    "train": "forward_backward",
}
PHASE_OF_TIMER_WITH_SERVER = {
    **PHASE_OF_TIMER,
    "weight_sync": "weight_sync",
    "sync_check": "sync_check",
    "generation": "generation",
}


def install(clock: Clock, job: Job, tokens: list[tuple[int, int]], canned: Any) -> type[MegatronGRPOTrainer]:
    """Install the timers and return the trainer's class."""
    if job.canned:

        class Engine(Canned):
            def __init__(self, config: VllmConfig, template: Template, stop: StopRequest) -> None:
                super().__init__(template, canned)

        vars(swift_megatron_grpo.loop.assemble)["LocalVllm"] = Engine
    setattr(MegatronGRPOTrainer, "save_checkpoint", do_nothing)  # noqa: B010  # mypy rejects a plain assignment
    _follow_timer(clock, PHASE_OF_TIMER_WITH_SERVER if job.served else PHASE_OF_TIMER)
    clock.time_method(LocalVllm, "load_weights", "weight_sync")
    if any(len(set(group)) > 1 for group in job.completion_tokens):
        request_one_by_one()
    _count_tokens(clock, tokens)
    return MegatronGRPOTrainer


def do_nothing(*_: Any) -> None: ...


def request_one_by_one() -> None:
    """Let vLLM receive each completion by itself: those of a prompt, as one request, would have one length."""
    vars(local_engine)["_batches"] = lambda requests, is_greedy: [[request] for request in requests]


def generation_method() -> tuple[type, str, Callable[[Request], str]]:
    """Return class and name of the method that generates, and a function from its requests to the prompt's text."""
    return LocalVllm, "_complete", lambda request: request.prompt.row["messages"][-1]["content"]


def _follow_timer(clock: Clock, phases: Mapping[str, str]) -> None:
    time_phase = PhaseTimer.__call__

    @contextmanager
    def time_both(self: PhaseTimer, phase: str) -> Iterator[None]:
        with clock.phase(phases.get(phase, REST)), time_phase(self, phase):
            yield

    vars(loop)["PhaseTimer"] = type("PhaseTimer", (PhaseTimer,), {"__call__": time_both})


class Canned:
    """GenerationEngine that returns prepared completions. All ranks make all of them; the first rank returns them."""

    memory_to_wake = 0
    drafts = None
    is_new = False
    lacks_base = False
    held_media = frozenset[str]()

    def __init__(self, template: Template, canned: Any) -> None:
        from torch.distributed import get_rank

        self.weights_version = -1
        self.share = Share(index=0, of=1, reports=get_rank() == 0)
        self._template = copy(template)
        self._template.max_length = None
        self._canned = canned

    def needs_weights(self, version: int) -> bool:
        return self.weights_version != version

    def mark_verified(self) -> None: ...

    def invalidate_weights(self) -> None: ...

    def generate(self, requests: Sequence[Request], group_size: int, sampling: SamplingConfig) -> Generation:
        return BatchGeneration(lambda: self._made_up(requests) if self.share.reports else {})

    def _made_up(self, requests: Sequence[Request]) -> dict[int, Rollout]:
        rows = [row_of(request.prompt.row["messages"][-1]["content"]) for request in requests]
        encoded: dict[int, list[int]] = {}
        rollouts = {}
        for row, request, (token_ids, text) in zip(rows, requests, self._canned.for_rows(rows), strict=True):
            ids = encoded.get(row) or encoded.setdefault(row, self._encode(request.prompt))
            rollouts[request.index] = Rollout(request.prompt, ids, token_ids, None, text, "stop", self.weights_version)
        return rollouts

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's tokens, encoded as ms-swift's trainer does: those before an assistant message."""
        sample = GRPOSample.from_row(prompt.row)
        sample.messages.append({"role": "assistant", "content": "x"})
        sample.response_token_ids = [[0]]
        encoded = encode_sample(sample, self._template)
        return [token for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True) if label == -100]

    def load_weights(
        self, weights: NamedWeights, version: int, adapter: AdapterConfig | None, collect_checksums: bool
    ) -> None:
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


def _count_tokens(clock: Clock, tokens: list[tuple[int, int]]) -> None:
    train_step = MegatronEngine.train_step

    def count_and_train(self: MegatronEngine, samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        if not clock.steps:
            outline = Outline.of(samples)  # the tokens of most samples are on other ranks
            tokens.extend(zip(outline.lengths.tolist(), outline.trained.tolist(), strict=True))
        return train_step(self, samples, *args, **kwargs)

    setattr(MegatronEngine, "train_step", count_and_train)  # noqa: B010  # mypy rejects a plain assignment

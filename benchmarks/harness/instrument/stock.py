"""Phases of a step in ms-swift's own trainer (4.6.0)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from swift.infer_engine import GRPOVllmEngine
from swift.megatron.trainers import base, grpo_trainer
from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer as Trainer
from swift.megatron.trainers.rollout_mixin import MegatronRolloutMixin

from benchmarks.harness.instrument.clock import Clock
from benchmarks.harness.job import Job
from benchmarks.harness.workload import row_of
from swift_megatron_grpo.generation.vllm.cuda_runtime import find_runtime_beside_tilelang
from swift_megatron_grpo.platforms.attention_packages import has_flash_attention
from swift_megatron_grpo.training.layers.torch_attention import replace_kernel, would_find_no_kernel
from swift_megatron_grpo.training.upstream_fixes.multi_tensor_kernels import bound_tensor_handles


def install(clock: Clock, job: Job, tokens: list[tuple[int, int]], canned: Any) -> Any:
    """Install the timers and return the trainer's class."""
    if job.canned:
        _without_engine(canned)
    # In the training processes: wake-up, offload and sleep, around the generation that force_lengths times.
    clock.time_method(Trainer, "_generate_completions", "generation" if job.served else "switch")
    clock.time_method(Trainer, "_move_model_to_vllm", "weight_sync")
    # After grading, ms-swift encodes and collates all samples and computes their log-probs, then the advantages.
    clock.time_method(Trainer, "_score_completions", "grading", then="logprobs")
    clock.time_method(Trainer, "_compute_advantages", "grading")
    schedule = base.get_forward_backward_func
    base.get_forward_backward_func = lambda: clock.timed("forward_backward", schedule())
    _count_tokens(clock, tokens)
    _attend_with_torch()
    bound_tensor_handles()  # without this its first step fails with adapters on the experts of a large model
    find_runtime_beside_tilelang()  # without this it does not start where tilelang is installed
    return Trainer


def generation_method() -> tuple[type, str, Callable[[Any], str]]:
    """Return class and name of the method that generates, and a function from its requests to the prompt's text."""
    return GRPOVllmEngine, "infer", lambda request: request.messages[-1]["content"]


def _without_engine(canned: Any) -> None:
    init_engine = MegatronRolloutMixin._init_rollout_engine

    def init_without_engine(self: Any) -> None:
        self.args.use_vllm = False
        init_engine(self)
        self.args.use_vllm = True

    def generate(self: Any, samples: list[Any]) -> list[Any]:
        samples = self._preprocess_inputs(samples)
        rows = [row_of(sample.messages[-1]["content"]) for sample in samples]
        for sample, (token_ids, text) in zip(samples, canned.for_rows(rows), strict=True):
            sample.messages.append({"role": "assistant", "content": text})
            sample.response_token_ids, sample.finish_reason, sample.add_eos = [token_ids], "stop", False
        return samples

    MegatronRolloutMixin._init_rollout_engine = init_without_engine
    Trainer._generate_completions = generate


def _attend_with_torch() -> None:
    """Give this trainer the attention kernel that the other one uses where flash-attn is not installed."""
    build = Attention.__init__

    def build_and_replace(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if torch.cuda.is_available() and not has_flash_attention() and would_find_no_kernel(self):
            replace_kernel(self)

    Attention.__init__ = build_and_replace


def _count_tokens(clock: Clock, tokens: list[tuple[int, int]]) -> None:
    encode = grpo_trainer.encode_sample

    def encode_and_count(*args: Any, **kwargs: Any) -> Any:
        encoded = encode(*args, **kwargs)
        if not clock.steps:
            labels = encoded["labels"]
            tokens.append((len(labels), len(labels) - labels.count(-100)))
        return encoded

    grpo_trainer.encode_sample = encode_and_count

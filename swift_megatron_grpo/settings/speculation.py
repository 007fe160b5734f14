"""Speculation without a draft model: what the engine verifies in a step beyond one token of each request."""

from __future__ import annotations

from typing import Annotated, Literal

from swift_megatron_grpo.settings.flag import Faults, Flags, Range, flag, rule
from swift_megatron_grpo.settings.layout import DataShape, ModelShape
from swift_megatron_grpo.types import Quantization

SpeculativeRollouts = Literal["off", "history"]
_THIS = "--speculative_rollouts history"
_INSTEAD = "or --speculative_rollouts off"


class Speculation(Flags):
    """Drafts of completions; generation reads them, and the loop, which remembers completions."""

    speculative_rollouts: SpeculativeRollouts = flag(
        "off",
        "history: vLLM generates the same completions in fewer steps. It verifies drafts of their next tokens, from "
        "the prompt, the group's other completions, and earlier completions of the prompt. A draft is accepted only "
        "where it is the token that would be sampled anyway, so --seed_completions true is required. On a GPU, the "
        "first model runner of vLLM generates, without asynchronous scheduling. docs/speculation.md says when it pays. "
        "Default: off.",
    )
    speculative_tokens: Annotated[int, Range(1, 4, high=16)] = flag(
        4,
        "With --speculative_rollouts history: the most drafts of a request in a step. A step verifies at most 64 of "
        "all requests together: 4 each while 16 run, 1 each while 64 run, none while more do. Default: 4.",
        example="8",
    )
    seed_completions: bool
    vllm_mode: str | None
    rollout_quantization: Quantization
    rollout_replay: str | None
    structured_outputs_regex: str | None
    min_p: float

    @rule
    def drafts_need_an_engine(self) -> Faults:
        if not self.drafts:
            if self.changed("speculative_tokens"):
                yield (
                    f"--speculative_tokens {self.speculative_tokens} is the number of drafts with {_THIS}; add that "
                    "flag, or leave this one out"
                )
        elif self.rollout_replay is not None:
            yield f"{_THIS}: --rollout_replay does not generate; leave one of them out"

    @rule
    def verification_is_exact(self) -> Faults:
        if not self.drafts:
            return
        if not self.seed_completions:
            yield (
                f"{_THIS} accepts a draft where it is what the completion's own noise samples, and only seeded "
                "completions have noise of their own; add --seed_completions true"
            )
        if self.vllm_mode == "server":
            yield f"{_THIS}: rollout servers have no drafts yet; use --vllm_mode colocate, {_INSTEAD}"
        if self.rollout_quantization != "none":
            yield (
                f"{_THIS}: no test compares drafted completions of quantized weights yet; use --rollout_quantization "
                f"none, {_INSTEAD}"
            )
        if self.structured_outputs_regex is not None:
            yield (
                f"{_THIS}: --structured_outputs_regex masks tokens, which no test has with drafts yet; use "
                "--speculative_rollouts off"
            )
        if self.min_p:
            yield (f"{_THIS}: vLLM does not apply --min_p {self.min_p:g} to rows of drafts; use --min_p 0, {_INSTEAD}")

    @rule
    def the_model_verifies_several_tokens(self, shape: ModelShape) -> Faults:
        what = (
            "a mixture of experts, whose drafts choose experts that a step reads in addition"
            if shape.experts is not None
            else "a model with linear attention, whose state vLLM has to take back behind a wrong draft"
            if shape.linear_heads
            else "a model with a sliding window, which no test has with drafts yet"
            if shape.unread_window is not None
            else None
        )
        if self.drafts and what is not None:
            yield f"{_THIS}: --model {shape.name} is {what}; use --speculative_rollouts off"

    @rule
    def texts_are_drafted(self, rows: DataShape) -> Faults:
        if self.drafts and rows.model_sees:
            yield (
                f"{_THIS}: the model has an image part, and placeholders of images are no text to draft from; use "
                "--speculative_rollouts off"
            )

    @property
    def drafts(self) -> int:
        """The most drafts of a request in a step; 0: none."""
        return self.speculative_tokens if self.speculative_rollouts == "history" else 0

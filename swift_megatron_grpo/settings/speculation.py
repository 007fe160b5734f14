"""Speculation without a separate draft model: what the engine verifies in a step beyond one token of each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from swift_megatron_grpo.settings.adapter import SyncCheckMode
from swift_megatron_grpo.settings.flag import Faults, Flags, Range, flag, rule
from swift_megatron_grpo.settings.layout import DataShape, Layout, ModelShape
from swift_megatron_grpo.settings.routing import RouterReplay
from swift_megatron_grpo.types import Quantization

SpeculativeRollouts = Literal["off", "history", "mtp"]
_INSTEAD = "or --speculative_rollouts off"
_PREDICTING = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # types whose drafted completions a test compares
_LEARNING = "qwen3_5"  # whose layer of multi-token prediction a test trains


class Speculation(Flags):
    """Drafts of completions; generation reads them, and the loop, which remembers completions."""

    speculative_rollouts: SpeculativeRollouts = flag(
        "off",
        "history: vLLM generates the same completions in fewer steps. It verifies drafts of their next tokens, from "
        "the prompt, the group's other completions, and earlier completions of the prompt. A draft is accepted only "
        "where it is the token that would be sampled anyway, so --seed_completions true is required. Servers need this "
        "flag and --speculative_tokens as well. mtp: the drafts come from the model's own layers of multi-token "
        "prediction (Qwen3.5, Qwen3-Next), and every rollout is compared with the trainer; --mtp_num_layers 1 trains "
        "the layer of a Qwen3.5. docs/speculation.md says when it pays. Default: off.",
    )
    speculative_tokens: Annotated[int, Range(1, 4, high=16)] = flag(
        4,
        "With --speculative_rollouts: the most drafts of a request in a step. With history a step verifies at most 64 "
        "of all requests together: 4 each while 16 run, 1 each while 64 run, none while more do. On a GPU a request "
        "has 1, 3, 7 or 15, the largest of these that fits. With mtp every request always has as many. Default: 4.",
        example="8",
    )
    seed_completions: bool
    vllm_mode: str | None
    rollout_quantization: Quantization
    rollout_replay: str | None
    structured_outputs_regex: str | None
    min_p: float
    top_p: float
    top_k: int
    repetition_penalty: float
    sync_check: SyncCheckMode
    vllm_enable_lora: bool
    vllm_enable_prefix_caching: bool
    router_replay_mode: RouterReplay
    router_agreement_samples: int
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float
    mtp_shared_weights: bool
    tuner_type: str
    optimizer: str
    optimizer_cpu_offload: bool
    sync_ref_model: bool
    chord_sft_dataset: list[str] | None
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None

    @rule
    def drafts_need_an_engine(self) -> Faults:
        if not self.drafts:
            if self.changed("speculative_tokens"):
                yield (
                    f"--speculative_tokens {self.speculative_tokens} is the number of drafts with "
                    "--speculative_rollouts history; add that flag, or leave this one out"
                )
        elif self.rollout_replay is not None:
            yield f"{self._this}: --rollout_replay does not generate; leave one of them out"

    @rule
    def verification_is_exact(self) -> Faults:
        if not self.drafts:
            return
        if not self.seed_completions:
            yield (
                f"{self._this} accepts a draft where it is what the completion's own noise samples, and only seeded "
                "completions have noise of their own; add --seed_completions true"
            )
        if self.vllm_mode == "server" and self.predicts:
            yield (
                f"{self._this}: trainers send servers no layers of multi-token prediction; use --vllm_mode colocate, "
                "--speculative_rollouts history, or --speculative_rollouts off"
            )
        if self.rollout_quantization != "none":
            yield (
                f"{self._this}: no test compares drafted completions of quantized weights yet; use "
                f"--rollout_quantization none, {_INSTEAD}"
            )
        if self.structured_outputs_regex is not None:
            yield (
                f"{self._this}: --structured_outputs_regex masks tokens, which no test has with drafts yet; use "
                "--speculative_rollouts off"
            )
        if self.min_p:
            yield (
                f"{self._this}: vLLM does not apply --min_p {self.min_p:g} to rows of drafts; use --min_p 0, {_INSTEAD}"
            )

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
        if self.drafts and not self.predicts and what is not None:
            yield f"{self._this}: --model {shape.name} is {what}; use --speculative_rollouts off"

    @rule
    def texts_are_drafted(self, rows: DataShape) -> Faults:
        if self.predicts and rows.media is not None:
            yield (
                f"{self._this}: the datasets have {rows.media}, with which no test has drafts yet; use "
                "--speculative_rollouts off"
            )
        elif self.drafts and not self.predicts and rows.model_sees:
            yield (
                f"{self._this}: the model has an image part, and placeholders of images are no text to draft from; use "
                "--speculative_rollouts off"
            )

    @rule
    def a_test_has_the_layers_that_predict(self, config: Mapping[str, Any]) -> Faults:
        kind = config.get("model_type")
        if self.predicts and kind not in _PREDICTING:
            yield (
                f"{self._this}: tests compare drafted completions of {', '.join(_PREDICTING)}, and model_type of "
                f"--model is {kind}; use --speculative_rollouts history or off"
            )

    @rule
    def states_of_wrong_drafts_are_noticed(self) -> Faults:
        """Layers of linear attention have a state, which vLLM has continued behind wrong drafts before."""
        if not self.predicts:
            return
        if self.vllm_enable_prefix_caching:
            yield (
                f"{self._this}: vLLM keeps states behind wrong drafts in its prefix cache (its issues 43559 and "
                "53912); use --vllm_enable_prefix_caching false"
            )
        if self.vllm_enable_lora:
            yield f"{self._this}: no test has drafts beside adapters in vLLM; use --vllm_enable_lora false"
        if self.router_replay_mode == "R3" or self.router_agreement_samples:
            yield (
                f"{self._this}: vLLM also reports the experts of wrong drafts; use --router_replay_mode R2 or "
                "disabled, and --router_agreement_samples 0"
            )
        if self.sync_check == "off":
            yield f"{self._this} compares every rollout with the trainer; use --sync_check canary"
        if self.top_p < 1 or self.top_k > 0 or self.repetition_penalty != 1:
            yield (
                f"{self._this} compares every rollout with the trainer, which samples from the whole policy; use "
                "--top_p 1 --top_k -1 --repetition_penalty 1"
            )

    @rule
    def the_layer_that_drafts_learns(self, layout: Layout) -> Faults:
        if not self.mtp_num_layers:
            return
        this, one = f"--mtp_num_layers {self.mtp_num_layers}", "released models have one such layer"
        step = "the layer has an optimizer step of its own"
        blocks = self.recompute_granularity == "full" and (self.recompute_method, self.recompute_num_layers)
        for refused, why, use in (
            (not self.predicts, "it trains the layer that drafts in rollouts", "--speculative_rollouts mtp"),
            (self.mtp_num_layers > 1, one, "--mtp_num_layers 1"),
            (self.mtp_shared_weights, one, "--mtp_shared_weights false"),
            (self.mtp_loss_scaling_factor != 0.1, f"{step}, which no factor changes",
             "--mtp_loss_scaling_factor 0.1"),
            (layout.pipeline_model_parallel_size > 1, "no test has the layer on the last of several stages",
             "--pipeline_model_parallel_size 1"),
            (layout.context_parallel_size > 1, "no test has it with parts of sequences", "--context_parallel_size 1"),
            (self.tuner_type != "full", "an adapter's checkpoint has no place for it", "--tuner_type full"),
            (self.optimizer == "muon", f"{step}, which no test has with Muon", "--optimizer adam"),
            (self.optimizer_cpu_offload, f"{step}, which is tested on the GPU", "--optimizer_cpu_offload false"),
            (self.sync_ref_model, "the reference has no such layer to move", "--sync_ref_model false"),
            (bool(self.chord_sft_dataset), "it learns from what the policy samples", "no --chord_sft_dataset"),
            (blocks not in (False, ("uniform", 1)), "mcore-bridge recomputes the layer by itself",
             "--recompute_method uniform --recompute_num_layers 1"),
        ):  # fmt: skip
            if refused:
                yield f"{this}: {why}; use {use}, or leave out --mtp_num_layers"

    @rule
    def a_test_trains_the_layer(self, config: Mapping[str, Any]) -> Faults:
        kind = config.get("model_type")
        if self.mtp_num_layers and kind != _LEARNING:
            yield f"--mtp_num_layers: a test trains the layer of {_LEARNING}, and --model is {kind}; leave it out"

    @property
    def _this(self) -> str:
        return f"--speculative_rollouts {self.speculative_rollouts}"

    @property
    def drafts(self) -> int:
        """The most drafts of a request in a step; 0: none."""
        return 0 if self.speculative_rollouts == "off" else self.speculative_tokens

    @property
    def predicts(self) -> bool:
        """True if the model's own layers of multi-token prediction draft."""
        return self.speculative_rollouts == "mtp"

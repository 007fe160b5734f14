"""Generation that runs ahead of training."""

from __future__ import annotations

from typing import Annotated

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, flag, rule
from swift_megatron_grpo.settings.losses import OldLogprobs

_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class Asynchronous(Flags):
    """Generation ahead of training; the loop reads it."""

    async_generate: bool
    max_staleness: Annotated[int | None, AtLeast(0, use=1)] = flag(
        None,
        "With --async_generate true: the number of rollouts by which generation may be ahead of training. 1: the next "
        "rollout is generated while one is trained, with the weights from before that training. 0: generation and "
        "training alternate, as without --async_generate. docs/async.md describes the effect on the loss. Default: 1.",
        example="2",
    )
    in_flight_weight_updates: bool = flag(
        False,
        "With --async_generate true: send newer weights to the servers while they generate. Completions continue "
        "with them, and keep their tokens and cache, so no rollout waits for the last completions of another one. "
        "--max_staleness then bounds the oldest token of a completion. docs/async.md has the details. Default: false.",
    )
    seed_completions: bool
    vllm_enable_lora: bool
    old_logprobs: OldLogprobs
    vllm_mode: str | None
    rollout_replay: str | None
    rollout_only: bool
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float

    @rule
    def staleness_needs_async(self) -> Faults:
        if self.max_staleness is not None and not self.async_generate:
            yield (
                f"--max_staleness {self.max_staleness} limits how far generation may be ahead with --async_generate "
                "true; add that flag, or leave this one out"
            )

    @rule
    def weights_in_flight(self) -> Faults:
        if not self.in_flight_weight_updates:
            return
        this = "--in_flight_weight_updates true"
        if not self.async_generate:
            yield f"{this} updates servers that generate during training; add --async_generate true, or leave it out"
        if self.seed_completions and self.rollouts_ahead:
            yield (
                f"{this} lets the clock decide which weights sample a token, and --seed_completions true makes "
                "completions repeatable; use --seed_completions false (--rollout_dump and --rollout_replay repeat such "
                "a run), or --max_staleness 0, with which no weights arrive in flight"
            )
        if self.vllm_enable_lora:
            yield (
                f"{this} loads the model's weights, and --vllm_enable_lora true sends the adapter alone; use "
                "--vllm_enable_lora false"
            )

    @rule
    def async_generates_and_trains(self) -> Faults:
        if not self.async_generate:
            return
        this = "--async_generate true generates during training, and"
        if self.rollout_only:
            yield f"{this} --rollout_only true does not train; leave one of them out"
        if self.rollout_replay is not None:
            yield f"{this} --rollout_replay does not generate; leave one of them out"
        if self.vllm_mode != "server":
            yield (
                f"{this} --vllm_mode colocate runs both on the same GPUs; use --vllm_mode server with `swift rollout` "
                "on separate GPUs (templates/async_server.sh), or leave it out"
            )

    @property
    def rollouts_ahead(self) -> int:
        """Number of rollouts by which generation may be ahead of training."""
        if not self.async_generate:
            return 0
        return 1 if self.max_staleness is None else self.max_staleness

    def notes(self) -> list[str]:
        """Return notes for the start-up log."""
        changed = [name for name, value in _NEUTRAL.items() if getattr(self, name) != value]
        engine = self.old_logprobs == "engine"
        if not changed or not (engine or self.rollouts_ahead):
            return []
        typed_first = "--old_logprobs engine" if engine else "--async_generate true"
        typed = " and ".join(f"--{name} {getattr(self, name)}" for name in changed)
        instead = " ".join(f"--{name} {_NEUTRAL[name]:g}" for name in changed)
        return [
            f"{typed_first}: vLLM's log-probs measure how far the policy has moved since generation, and with "
            f"{typed} they belong to another distribution than the policy's; use {instead}"
        ]

"""Router replay: the experts that a mixture's routers choose, replayed from the engine or compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, flag, rule
from swift_megatron_grpo.settings.layout import ModelShape

# R2: the experts of the trainer before the first update of a rollout are replayed. R3: those of the engine.
RouterReplay = Literal["disabled", "R2", "R3"]


class Routing(Flags):
    """Router replay; generation, the loop and the passes of training read it."""

    router_replay_mode: RouterReplay
    router_agreement_samples: Annotated[int, AtLeast(0, use=16)] = flag(
        0,
        "Number of completions of each rollout for which the experts that the trainer's routers choose are "
        "compared with those that vLLM chose, in one forward pass: rollout/router_agreement is the share of tokens "
        "and layers with the same experts. It shows whether --router_replay_mode R3 is worth its bytes: "
        "docs/moe.md. Default: 0, no comparison.",
        example="16",
    )
    moe_router_load_balancing_type: Sequence[str] | str | None
    model: str | None

    @rule
    def routers_can_be_replayed(self, shape: ModelShape) -> Faults:
        typed = [f"--router_replay_mode {self.router_replay_mode}"] if self.router_replay_mode != "disabled" else []
        typed += (
            [f"--router_agreement_samples {self.router_agreement_samples}"] if self.router_agreement_samples else []
        )
        flags = " and ".join(typed)
        if flags and shape.experts is None:
            yield f"{flags}: --model {self.model} is dense, so it has no routers that choose experts; leave it out"
        elif flags and "sinkhorn" in (self.moe_router_load_balancing_type or ()):
            yield (
                f"{flags}: --moe_router_load_balancing_type sinkhorn chooses experts in a way that cannot be replayed; "
                "use --moe_router_load_balancing_type aux_loss, or --router_replay_mode disabled"
            )

    def requested(self, completions: int) -> int:
        """Return for how many of these completions the engine returns experts: the first ones."""
        if self.router_replay_mode == "R3":
            return completions
        return min(self.router_agreement_samples, completions)

    def notes(self, steps_per_rollout: int) -> list[str]:
        """Return notes for the start-up log."""
        if self.router_replay_mode != "R2" or steps_per_rollout > 1:
            return []
        return [
            "--router_replay_mode R2: without effect, because a rollout is trained in one optimizer step, which routes "
            "as the old policy does; --router_replay_mode R3 replays the experts that vLLM chose"
        ]

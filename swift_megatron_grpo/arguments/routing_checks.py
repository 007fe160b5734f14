"""Checks of the flags of router replay. Pure functions on plain values, as in layout_checks.py."""

from __future__ import annotations

from swift_megatron_grpo.config import RouterReplay


def check_routing(replay: RouterReplay, compared: int, model: str, experts: int | None, balancing: list[str]) -> None:
    """Check --router_replay_mode and --router_agreement_samples. `experts`: of config.json; None: a dense model."""
    if compared < 0:
        raise ValueError(f"--router_agreement_samples {compared} must be at least 0; use --router_agreement_samples 16")
    flags = [f"--router_replay_mode {replay}"] if replay != "disabled" else []
    flags += [f"--router_agreement_samples {compared}"] if compared else []
    if not flags:
        return
    if experts is None:
        raise ValueError(
            f"{' and '.join(flags)}: --model {model} is dense, so it has no routers that choose experts; leave it out"
        )
    if "sinkhorn" in balancing:
        raise ValueError(
            f"{' and '.join(flags)}: --moe_router_load_balancing_type sinkhorn chooses experts in a way that cannot be "
            "replayed; use --moe_router_load_balancing_type aux_loss, or --router_replay_mode disabled"
        )


def start_up_notes(replay: RouterReplay, steps_per_rollout: int) -> list[str]:
    """Return notes for the start-up log."""
    if replay != "R2" or steps_per_rollout > 1:
        return []
    return [
        "--router_replay_mode R2: without effect, because a rollout is trained in one optimizer step, which routes as "
        "the old policy does; --router_replay_mode R3 replays the experts that vLLM chose"
    ]

"""Parts of the loss with flags of their own: SAPO, FIPO, rollout correction, KL to the reference."""

from __future__ import annotations

from typing import Annotated, Literal

from swift_megatron_grpo.settings.flag import Above, Faults, Flags, flag, rule

KlEstimator = Literal["k1", "abs", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Sapo(Flags):
    """Temperatures of the SAPO loss."""

    tau_pos: Annotated[float, Above(0, use=1.0)] = 1.0
    tau_neg: Annotated[float, Above(0, use=1.05)] = 1.05


class Fipo(Flags):
    """Token weights of the FIPO loss."""

    fipo_decay_rate: Annotated[float, Above(0, use=32)] = 32.0  # half-life, in tokens
    fipo_clip_range: float | None = 0.2  # None or 0: the weight is not clipped
    fipo_clip_high_only: bool = True
    fipo_safety_threshold: float | None = 4.0


class Correction(Flags):
    """Correction for the difference between the engine's log-probs and the trainer's under the same policy."""

    rollout_importance_sampling_mode: CorrectionMode | None = None
    rollout_importance_sampling_threshold: Annotated[float, Above(0, use=2.0)] = 2.0
    log_rollout_offpolicy_metrics: bool = False
    off_policy_sequence_mask_delta: float | None = None


class Kl(Flags):
    """The KL to the reference: its estimator, its place, and the beta that adapts to it."""

    kl_in_reward: bool | None
    kl_estimator: KlEstimator | None = flag(
        None,
        "Estimator of the KL to the reference, per token: k1 is log(pi/ref), abs is its absolute value, "
        "k2 is half its square, k3 is ref/pi - 1 - log(ref/pi). Default: ms-swift's, which is k3 in the loss and "
        "k1 in the reward (--kl_in_reward).",
    )
    kl_target: Annotated[float | None, Above(0, use=0.01, why="it is a KL per token")] = flag(
        None,
        "KL per token towards which beta is adapted: beta grows while the measured KL is above the target "
        "and shrinks while it is below. --beta is the initial value. Default: none, beta is fixed.",
        example="0.01",
    )
    kl_horizon: Annotated[int, Above(0, use=10000)] = flag(
        10000,
        "Number of completions over which --kl_target adapts beta; a larger number adapts more slowly. Default: 10000.",
        example="2000",
    )
    beta: float | None

    @rule
    def beta_can_adapt(self) -> Faults:
        if self.kl_target is not None and self.beta == 0:
            yield (
                "--kl_target adapts --beta, and at --beta 0 there is no reference; use --beta 0.04 as the initial value"
            )

    @property
    def in_reward(self) -> bool:
        """True if the KL is subtracted from rewards instead of added to the loss."""
        return bool(self.kl_in_reward) and self.beta != 0

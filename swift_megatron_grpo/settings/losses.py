"""The loss, and its parts with flags of their own: SAPO, FIPO, rollout correction, KL to the reference."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from swift_megatron_grpo.settings.distillation import Rlsd, Sdar
from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, OneOf, flag, rule

RatioLevel = Literal["token", "sequence", "sequence_token"]
KlEstimator = Literal["k1", "abs", "k2", "k3"]
OldLogprobs = Literal["policy", "engine"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
# By --loss_type: does the loss clip the ratio? The functions are training.loss.LOSSES. Plugins add to both.
CLIPS_RATIO = {
    "grpo": True, "bnpo": True, "dr_grpo": True, "dapo": True, "luspo": True, "cispo": False, "sapo": False,
    "vespo": False, "dppo_tv": False, "dppo_kl": False, "real": False, "fipo": True,
}  # fmt: skip


class Sapo(Flags):
    tau_pos: Annotated[float, Above(0, use=1.0)] = 1.0
    tau_neg: Annotated[float, Above(0, use=1.05)] = 1.05


class Vespo(Flags):
    vespo_k_pos: Annotated[float, AtLeast(0, use=2.0)] = flag(
        2.0,
        "Of --loss_type vespo: power of a completion's importance weight where its advantage is at least 0. A larger "
        "one weakens completions that have become less probable. Default: 2, TRL's, as are all vespo flags.",
        example="1.5",
    )
    vespo_lambda_pos: Annotated[float, Above(0, use=3.0)] = flag(
        3.0,
        "Of --loss_type vespo: decay by a completion's importance weight where its advantage is at least 0. A larger "
        "one weakens completions that have become more probable. Default: 3.",
        example="2",
    )
    vespo_k_neg: Annotated[float, AtLeast(0, use=3.0)] = flag(
        3.0, "As --vespo_k_pos, for advantages below 0. Default: 3.", example="2"
    )
    vespo_lambda_neg: Annotated[float, Above(0, use=2.0)] = flag(
        2.0, "As --vespo_lambda_pos, for advantages below 0. Default: 2.", example="1"
    )


class Fipo(Flags):
    fipo_decay_rate: Annotated[float, Above(0, use=32)] = 32.0  # half-life, in tokens
    fipo_clip_range: Annotated[float | None, AtLeast(0, use=0.2, why="0 does not clip the weight")] = 0.2
    fipo_clip_high_only: bool = True
    fipo_safety_threshold: Annotated[float | None, Above(0, use=4.0, why="ratios are positive")] = 4.0


class Correction(Flags):
    """Correction for the difference between the engine's log-probs and the trainer's under the same policy."""

    rollout_importance_sampling_mode: CorrectionMode | None = None
    rollout_importance_sampling_threshold: Annotated[float, Above(0, use=2.0)] = 2.0
    log_rollout_offpolicy_metrics: bool = False
    off_policy_sequence_mask_delta: Annotated[
        float | None, AtLeast(0, use=0.5, why="a negative one masks completions on which both policies agree")
    ] = None
    m2_threshold: Annotated[float | None, Above(0, use=0.04, why="it is a mean of squares")] = flag(
        None,
        "Limit of the mean squared log-ratio of a step's tokens, of the policy to the one that sampled them (vLLM's "
        "log-probs). The tokens with the largest squares are left out of the policy loss until the mean of the others "
        "is below it. This is M2PO's mask (arXiv 2510.01161), for completions of old weights; it costs one more "
        "forward pass per step. Default: none.",
        example="0.04",
    )
    old_logprobs: OldLogprobs = flag(
        "policy",
        "Old log-probs, the denominator of the clipped ratio. policy: the trainer's own, which a pass computes before "
        "the first update if a rollout is trained in several steps; for completions of older weights without a "
        "--rollout_importance_sampling_mode, vLLM's. engine: vLLM's for all completions, without that pass. The ratio "
        "then contains the difference between vLLM and the trainer, also in the first step. Default: policy.",
    )

    @rule
    def one_use_of_the_engines_logprobs(self) -> Faults:
        mode = self.rollout_importance_sampling_mode
        if self.old_logprobs == "engine" and mode is not None:
            yield (
                f"--rollout_importance_sampling_mode {mode} weights tokens by old log-probs relative to vLLM's, and "
                "with --old_logprobs engine both are the same; use --old_logprobs policy, or leave the mode out"
            )


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


class LossConfig(Flags):
    """The policy loss and its KL and entropy terms; training reads it."""

    loss_type: Annotated[str | None, OneOf(CLIPS_RATIO)] = None
    epsilon: Annotated[float, AtLeast(0, use=0.2)] = 0.2
    epsilon_high: Annotated[float | None, AtLeast(0, use=0.2)] = None
    importance_sampling_level: RatioLevel = "token"
    delta: float | None = None
    dual_clip: float | None = flag(
        None,
        "Bound on the loss of tokens with a negative advantage: at most this value times the advantage's "
        "size, however large the ratio is. It must be above 1 + epsilon_high; 3 is common. --delta is ms-swift's "
        "flag for the same bound. Default: none.",
        example="3",
    )
    real_tau: Annotated[float, Above(0, use=0.5)] = 0.5
    entropy_coef: float = flag(
        0.0,
        "Weight of the entropy bonus: the policy's entropy times this value is subtracted from the loss, "
        "averaged in the same way as the loss. Default: 0, no bonus.",
        example="0.001",
    )
    log_entropy: bool = False
    max_completion_length: int = 512
    beta: Annotated[float | None, AtLeast(0, use=0)]
    kl_estimator: KlEstimator | None = None
    use_bias_correction_kl: bool = flag(
        False,
        "Multiply the KL in the loss by the importance ratio of its token, as DeepSeek-V3.2 does: its value and its "
        "gradient then are those of the current policy's KL, although an older policy has sampled the tokens. It is "
        "TRL's flag. Default: false, as in ms-swift.",
    )
    teacher_kl_coef: float = 1.0
    rlsd: Rlsd = field(default_factory=Rlsd)
    sdar: Sdar = field(default_factory=Sdar)
    sapo: Sapo = field(default_factory=Sapo)
    vespo: Vespo = field(default_factory=Vespo)
    fipo: Fipo = field(default_factory=Fipo)
    correction: Correction = field(default_factory=Correction)

    @rule
    def gspo_is_a_level(self) -> Faults:
        if str(self.loss_type).lower() == "gspo":
            yield (
                f"--loss_type {self.loss_type}: GSPO is a level of importance sampling; leave it out and use "
                "--importance_sampling_level sequence"
            )

    @rule
    def vespo_weighs_whole_completions(self) -> Faults:
        if self.name != "vespo":
            return
        mode = self.correction.rollout_importance_sampling_mode
        if mode is not None:
            yield (
                f"--rollout_importance_sampling_mode {mode} weights single tokens, and --loss_type vespo weights whole "
                "completions; use --old_logprobs engine instead, with which that weight is relative to vLLM's log-probs"
            )
        if self.importance_sampling_level != "token":
            yield (
                f"--importance_sampling_level {self.importance_sampling_level} has no effect on --loss_type vespo, "
                "which computes a ratio of its own; leave it out"
            )

    @rule
    def bounds_are_of_clipped_ratios(self) -> Faults:
        for name, bound in (("delta", self.delta), ("dual_clip", self.dual_clip)):
            if bound is None:
                continue
            if not CLIPS_RATIO.get(self.name):
                yield (
                    f"--{name} {bound} bounds a clipped ratio, and --loss_type {self.name} does not clip ratios; leave "
                    "it out"
                )
            if not bound > 1 + self.high:
                yield (
                    f"--{name} {bound} must be above 1 + epsilon_high = {1 + self.high:g}, where clipping begins; use 3"
                )
        if self.delta is not None and self.dual_clip is not None:
            yield "--delta and --dual_clip bound the same tokens, those with negative advantages; leave one out"

    @property
    def name(self) -> str:
        """The key of training.loss.LOSSES."""
        return self.loss_type or "grpo"

    @property
    def high(self) -> float:
        """The upper clipping bound, given or implied by epsilon."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def estimator(self) -> KlEstimator:
        return self.kl_estimator or "k3"

    @property
    def kl_weight(self) -> float:
        """Weight of the KL to the reference; 0: there is no reference."""
        return self.beta or 0.0

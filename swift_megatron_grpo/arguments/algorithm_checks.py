"""Checks of the flags that select the algorithm: refuse contradictions, and advise on the values to set instead.

Pure functions on plain values, like layout_checks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from swift_megatron_grpo.arguments.advice import use_flag
from swift_megatron_grpo.arguments.problems import check_all

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "fipo")  # the losses that clip the ratio
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_plain")
WITHOUT_GROUPS = "reinforce_plus_plus_plain"  # its baseline is the mean of the whole rollout
SCALES = ("group", "batch", "none", "gdpo")
LEVELS = ("token", "sequence", "sequence_token")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3")
_USUAL = {  # values that work
    "tau_pos": 1.0, "tau_neg": 1.05, "real_tau": 0.5, "fipo_decay_rate": 32, "kl_horizon": 10000,
    "rollout_importance_sampling_threshold": 2.0, "epsilon": 0.2, "epsilon_high": 0.2, "beta": 0,
    "max_resample_times": 3,
}  # fmt: skip
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, slots=True)
class AlgorithmFlags:
    """Values as typed; None for a flag that was not."""

    loss_type: str | None
    advantage_estimator: str
    scale_rewards: str | None
    kl_in_reward: bool | None
    kl_estimator: str | None
    kl_target: float | None
    kl_horizon: int
    beta: float | None
    importance_sampling_level: str
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    dual_clip: float | None
    tau_pos: float
    tau_neg: float
    real_tau: float
    fipo_decay_rate: float
    fipo_clip_range: float | None
    fipo_clip_high_only: bool
    fipo_safety_threshold: float | None
    entropy_coef: float
    top_entropy_quantile: float
    dynamic_sample: bool
    max_resample_times: int
    rollout_importance_sampling_mode: str | None
    rollout_importance_sampling_threshold: float
    log_rollout_offpolicy_metrics: bool
    off_policy_sequence_mask_delta: float | None
    num_generations: int
    num_generations_eval: int | None
    micro_batch_size: int
    global_batch_size: int
    max_tokens_per_micro_batch: int | None

    @property
    def loss(self) -> str:
        return self.loss_type or "grpo"

    @property
    def high(self) -> float:
        """The upper clipping bound, given or implied by epsilon."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def in_reward(self) -> bool:
        """True if the KL is subtracted from rewards, as set or as the estimator implies."""
        return self.advantage_estimator != "grpo" if self.kl_in_reward is None else self.kl_in_reward


def defaults_of(estimator: str) -> dict[str, Any]:
    """Return the defaults that ms-swift derives from the estimator."""
    scales = {"grpo": "group", "rloo": "none"}
    return {"scale_rewards": scales.get(estimator, "batch"), "kl_in_reward": estimator != "grpo"}


def flags_of(values: Mapping[str, Any]) -> AlgorithmFlags:
    """Select the flags of the algorithm from all values."""
    return AlgorithmFlags(**{field.name: values[field.name] for field in fields(AlgorithmFlags)})


def check_algorithm(flags: AlgorithmFlags) -> None:
    """Run every check of this file and raise one ValueError with all problems."""
    checks: list[Callable[[AlgorithmFlags], None]] = [
        _check_choices,
        _check_ranges,
        _check_estimator,
        _check_kl,
        _check_clipping,
        _check_real,
        _check_dynamic_sampling,
    ]
    check_all([partial(check, flags) for check in checks])


def _check_choices(flags: AlgorithmFlags) -> None:
    chosen: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("loss_type", flags.loss_type, LOSSES),
        ("advantage_estimator", flags.advantage_estimator, ESTIMATORS),
        ("scale_rewards", flags.scale_rewards, SCALES),
        ("importance_sampling_level", flags.importance_sampling_level, LEVELS),
        ("kl_estimator", flags.kl_estimator, KL_ESTIMATORS),
        ("rollout_importance_sampling_mode", flags.rollout_importance_sampling_mode, MODES),
    ]
    for flag, value, known in chosen:
        if value is not None and value not in known:
            other = "--importance_sampling_level sequence is GSPO; " if value.lower() == "gspo" else ""
            raise ValueError(f"--{flag} {value}: unknown value; {other}{use_flag(flag, known)}")


def _check_ranges(flags: AlgorithmFlags) -> None:
    if not 0 < flags.top_entropy_quantile <= 1:
        raise ValueError(
            f"--top_entropy_quantile {flags.top_entropy_quantile} must be above 0 and at most 1: it is the share of "
            "tokens that are trained; use 0.2 to train the fifth with the highest entropy, or 1.0 to train all"
        )
    above_zero = {
        "tau_pos": flags.tau_pos,
        "tau_neg": flags.tau_neg,
        "real_tau": flags.real_tau,
        "fipo_decay_rate": flags.fipo_decay_rate,
        "rollout_importance_sampling_threshold": flags.rollout_importance_sampling_threshold,
        "kl_horizon": flags.kl_horizon,
    }
    for flag, value in above_zero.items():
        if value <= 0:  # value_ranges.py refuses NaN and infinity
            raise ValueError(f"--{flag} {value} must be above 0; use --{flag} {_USUAL[flag]}")
    not_negative = {
        "epsilon": flags.epsilon,
        "epsilon_high": flags.high,
        "beta": flags.beta or 0.0,
        "max_resample_times": flags.max_resample_times,
    }
    for flag, value in not_negative.items():
        if value < 0:
            raise ValueError(f"--{flag} {value} must not be negative; use --{flag} {_USUAL[flag]}")


def _check_estimator(flags: AlgorithmFlags) -> None:
    estimator, scale = flags.advantage_estimator, flags.scale_rewards
    if flags.num_generations_eval is not None and flags.num_generations_eval < 1:
        raise ValueError(
            f"num_generations_eval ({flags.num_generations_eval}) must be at least 1; use --num_generations_eval 8"
        )
    if flags.num_generations == 1 and estimator != WITHOUT_GROUPS:
        raise ValueError(
            f"num_generations ({flags.num_generations}) must be at least 2: an advantage compares the completions of "
            "one prompt, and a single completion would always get 0; use --num_generations 8, or --advantage_estimator "
            f"{WITHOUT_GROUPS}, which compares all completions of a rollout"
        )
    if estimator == WITHOUT_GROUPS and scale == "group":
        raise ValueError(
            f"--advantage_estimator {estimator} has no groups, so --scale_rewards group has no meaning; use "
            "--scale_rewards batch or none"
        )
    if scale == "gdpo" and estimator != "grpo":
        raise ValueError(
            f"--scale_rewards gdpo computes its own baseline, so --advantage_estimator {estimator} would have no "
            "effect; use --advantage_estimator grpo"
        )
    if scale == "gdpo" and flags.in_reward and flags.beta != 0:
        raise ValueError(
            "--scale_rewards gdpo normalises every reward function separately, and the KL is not a reward function; "
            "use --kl_in_reward false"
        )


def _check_kl(flags: AlgorithmFlags) -> None:
    if flags.kl_target is None:
        return
    if flags.beta == 0:
        raise ValueError(
            "--kl_target adapts --beta, and at --beta 0 there is no reference; use --beta 0.04 as the initial value"
        )
    if not flags.kl_target > 0 or math.isinf(flags.kl_target):
        raise ValueError(f"--kl_target {flags.kl_target} must be above 0: it is a KL per token; use for example 0.01")


def _check_clipping(flags: AlgorithmFlags) -> None:
    for flag, bound in (("delta", flags.delta), ("dual_clip", flags.dual_clip)):
        if bound is None:
            continue
        if flags.loss not in CLIPPED:
            raise ValueError(
                f"--{flag} {bound} bounds a clipped ratio, and --loss_type {flags.loss} does not clip ratios; leave it "
                "out"
            )
        if not bound > 1 + flags.high:
            raise ValueError(
                f"--{flag} {bound} must be above 1 + epsilon_high = {1 + flags.high:g}, where clipping begins; use 3"
            )
    if flags.delta is not None and flags.dual_clip is not None:
        raise ValueError("--delta and --dual_clip bound the same tokens, those with negative advantages; leave one out")


def _check_real(flags: AlgorithmFlags) -> None:
    if flags.loss != "real":
        return
    size, group = flags.micro_batch_size, flags.num_generations
    if flags.max_tokens_per_micro_batch is not None:
        raise ValueError(
            "--loss_type real compares the completions of a prompt, and --max_tokens_per_micro_batch distributes them "
            f"over several micro batches; leave it out and use --micro_batch_size {group}"
        )
    if size % group or flags.global_batch_size % group:
        raise ValueError(
            f"--loss_type real compares the completions of a prompt, and micro_batch_size ({size}) splits groups of "
            f"num_generations ({group}); use --micro_batch_size {-(-size // group) * group} and a --global_batch_size "
            "that is a multiple of it"
        )
    if flags.advantage_estimator == WITHOUT_GROUPS:
        raise ValueError(f"--loss_type real needs groups; use --advantage_estimator grpo, not {WITHOUT_GROUPS}")
    token_flags = [
        ("importance_sampling_level", flags.importance_sampling_level, "token"),
        ("top_entropy_quantile", flags.top_entropy_quantile, 1.0),
        ("rollout_importance_sampling_mode", flags.rollout_importance_sampling_mode, None),
    ]
    for flag, value, neutral in token_flags:
        if value != neutral:
            raise ValueError(
                f"--{flag} {value} applies to single tokens, and --loss_type real scores whole completions; leave it "
                "out"
            )


def _check_dynamic_sampling(flags: AlgorithmFlags) -> None:
    if not flags.dynamic_sample:
        return
    if flags.num_generations < 2:
        raise ValueError(
            "--dynamic_sample keeps prompts whose completions differ in reward, which is impossible with "
            f"num_generations ({flags.num_generations}); use --num_generations 8, or --dynamic_sample false"
        )
    if flags.max_resample_times < 1:
        raise ValueError(
            f"--dynamic_sample with --max_resample_times {flags.max_resample_times} never samples again; use "
            "--max_resample_times 3, or --dynamic_sample false"
        )


def start_up_notes(flags: AlgorithmFlags) -> list[str]:
    """Return notes for the start-up log: flags without effect, as in ms-swift, and values that are likely mistakes."""
    notes = []
    tuned = {
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "real": {"real_tau": 0.5},
        "fipo": {
            "fipo_decay_rate": 32.0,
            "fipo_clip_range": 0.2,
            "fipo_clip_high_only": True,
            "fipo_safety_threshold": 4.0,
        },
    }
    for loss, defaults in tuned.items():
        changed = [f"--{flag}" for flag, default in defaults.items() if getattr(flags, flag) != default]
        if changed and flags.loss != loss:
            notes.append(f"{', '.join(changed)}: for --loss_type {loss}, without effect on --loss_type {flags.loss}")
    if flags.loss in ("sapo", "real") and flags.epsilon_high is not None:
        notes.append(f"--epsilon_high has no effect on --loss_type {flags.loss}, which does not clip ratios")
    if flags.loss == "cispo" and flags.high < 1:
        notes.append(
            f"--loss_type cispo bounds token weights at epsilon_high itself ({flags.high:g}), which is below 1, the "
            "weight of a token with an unchanged probability; --epsilon_high 5 is common"
        )
    return notes

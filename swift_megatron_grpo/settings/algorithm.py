"""The algorithm: loss, advantages, KL to the reference, entropy, dynamic sampling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, OneOf, Range, flag, rule
from swift_megatron_grpo.settings.losses import CLIPS_RATIO, Kl, LossConfig
from swift_megatron_grpo.settings.teacher import WITHOUT_REWARDS, Teacher

ScaleRewards = Literal["group", "batch", "none", "gdpo"]


@dataclass(frozen=True, slots=True)
class Estimator:
    """The defaults of an advantage estimator, and what it compares."""

    scale_rewards: ScaleRewards
    kl_in_reward: bool
    has_groups: bool = True  # False: its baseline is that of the whole rollout, and one completion per prompt is enough


MAXRL = "maxrl"
OPTIMAL_TOKEN = "optimal_token_baseline"
WITHOUT_GROUPS = "reinforce_plus_plus_plain"
_PENALTIES = ("soft_overlong", "repetition")  # ms-swift's reward functions that are never above 0
# By --advantage_estimator, with ms-swift's defaults. Their baselines are in grading/advantages.py. Plugins add to both.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator("group", kl_in_reward=False),
    "rloo": Estimator("none", kl_in_reward=True),
    "reinforce_plus_plus": Estimator("batch", kl_in_reward=True),
    "reinforce_plus_plus_plain": Estimator("batch", kl_in_reward=True, has_groups=False),
    "maxrl": Estimator("none", kl_in_reward=False),
    "optimal_token_baseline": Estimator("none", kl_in_reward=False),
}


class Algorithm(Flags):
    """Loss, advantages and KL; training, grading and the loop read it."""

    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = flag(
        "grpo",
        "The baseline that is subtracted from a reward. grpo: the mean of the prompt's completions. rloo: the mean of "
        "the prompt's other completions. reinforce_plus_plus: the baseline of grpo, with advantages scaled over the "
        "batch (the paper's REINFORCE++-baseline). reinforce_plus_plus_plain: the mean of the whole rollout (the "
        "paper's REINFORCE++); it also works with --num_generations 1. maxrl: the baseline of grpo, and advantages are "
        "divided by it; for rewards of at least 0. optimal_token_baseline: a baseline for every token, a mean of the "
        "prompt's completions weighted by how uncertain the policy was up to there; it takes two passes. The first "
        "three are ms-swift's. Default: grpo.",
    )
    scale_rewards: ScaleRewards | None
    top_entropy_quantile: Annotated[
        float,
        Range(0, 0.2, high=1, above_low=True, why="it is the share of tokens, of the highest entropy, in the loss"),
    ]
    dynamic_sample: bool
    max_resample_times: Annotated[int, AtLeast(0, use=3)]
    spare_groups: str = flag(
        "0",
        "With --dynamic_sample true: the number of groups of further prompts that are generated and graded with a "
        "rollout, before it is known which of its groups have equal rewards. They are taken in the order in which they "
        "would be drawn, and the rest is dropped: the batch is the same, without the time of the rounds. auto: as many "
        "as the last 8 rollouts needed, and 15 %% more. At most --max_resample_times times the groups of a rollout. "
        "Default: 0.",
        example="auto",
    )
    kl: Kl
    loss: LossConfig
    teacher: Teacher
    num_generations: int
    micro_batch_size: int
    global_batch_size: int
    max_tokens_per_micro_batch: int | None

    @property
    def _has_groups(self) -> bool:
        estimator = self.advantage_estimator
        return estimator not in ESTIMATORS or ESTIMATORS[estimator].has_groups

    @rule
    def completions_can_be_compared(self) -> Faults:
        estimator, scale, kl_in_reward = self.advantage_estimator, self.scale_rewards, self.kl.kl_in_reward
        if kl_in_reward is None and estimator in ESTIMATORS:
            kl_in_reward = ESTIMATORS[estimator].kl_in_reward
        if self.num_generations == 1 and self.teacher.is_alone:
            if kl_in_reward and self.loss.beta != 0:
                yield (
                    "--kl_in_reward true compares the completions of a prompt, and num_generations "
                    f"({self.num_generations}) is 1; use --kl_in_reward false"
                )
        elif self.num_generations == 1 and self._has_groups:
            yield (
                f"num_generations ({self.num_generations}) must be at least 2: an advantage compares the completions "
                "of one prompt, and a single completion would always get 0; use --num_generations 8, or "
                f"--advantage_estimator {WITHOUT_GROUPS}, which compares all completions of a rollout"
            )
        if not self._has_groups and scale == "group":
            yield (
                f"--advantage_estimator {estimator} has no groups, so --scale_rewards group has no meaning; use "
                "--scale_rewards batch or none"
            )
        if scale == "gdpo" and self.teacher.is_alone:
            yield f"--scale_rewards gdpo {WITHOUT_REWARDS}, or --scale_rewards group"
        if scale == "gdpo" and estimator != "grpo":
            yield (
                f"--scale_rewards gdpo computes its own baseline, so --advantage_estimator {estimator} would have no "
                "effect; use --advantage_estimator grpo"
            )
        if scale == "gdpo" and kl_in_reward and self.loss.beta != 0:
            yield (
                "--scale_rewards gdpo normalises every reward function separately, and the KL is not a reward "
                "function; use --kl_in_reward false"
            )

    @rule
    def maxrl_divides_by_the_mean(self) -> Faults:
        if self.advantage_estimator != MAXRL:
            return
        if self.scale_rewards not in (None, "none", "gdpo"):
            yield (
                f"--advantage_estimator {MAXRL} divides advantages by the mean reward, and --scale_rewards "
                f"{self.scale_rewards} would divide them again; use --scale_rewards none"
            )
        if self.kl.kl_in_reward and self.loss.beta != 0:
            yield (
                f"--advantage_estimator {MAXRL} needs rewards of at least 0, and --kl_in_reward true subtracts from "
                "them; use --kl_in_reward false"
            )
        rewards = self.teacher.rewards
        for name in rewards.servers.reward_funcs:
            if name in _PENALTIES:
                yield (
                    f"--advantage_estimator {MAXRL} needs rewards of at least 0, and --reward_funcs {name} is a "
                    "penalty; use --advantage_estimator grpo, or leave the function out"
                )
        for weight in rewards.reward_weights or ():
            if weight < 0:
                yield (
                    f"--advantage_estimator {MAXRL} needs rewards of at least 0, and --reward_weights has {weight:g}; "
                    "use weights of at least 0, or --advantage_estimator grpo"
                )

    @rule
    def token_baseline_is_the_only_one(self) -> Faults:
        estimator = self.advantage_estimator
        if estimator != OPTIMAL_TOKEN:
            return
        if self.scale_rewards not in (None, "none", "gdpo"):
            yield (
                f"--advantage_estimator {estimator} subtracts its baselines after rewards were scaled, so "
                f"--scale_rewards {self.scale_rewards} would not scale advantages; use --scale_rewards none"
            )
        if self.kl.kl_in_reward and self.loss.beta != 0:
            yield (
                f"--advantage_estimator {estimator} compares the rewards of whole completions, and --kl_in_reward true "
                "has one for every token; use --kl_in_reward false"
            )
        if self.loss.name == "real":
            yield (
                f"--loss_type real compares whole completions, and --advantage_estimator {estimator} gives every token "
                "an advantage of its own; use --loss_type grpo"
            )
        if self.loss.correction.off_policy_sequence_mask_delta is not None:
            yield (
                "--off_policy_sequence_mask_delta masks completions of negative advantage, and --advantage_estimator "
                f"{estimator} gives every token an advantage of its own; leave one of them out"
            )

    @rule
    def real_has_whole_groups(self) -> Faults:
        if self.loss.name != "real":
            return
        size, group = self.micro_batch_size, self.num_generations
        if self.max_tokens_per_micro_batch is not None:
            yield (
                "--loss_type real compares the completions of a prompt, and --max_tokens_per_micro_batch distributes "
                f"them over several micro batches; leave it out and use --micro_batch_size {group}"
            )
        elif size % group or self.global_batch_size % group:
            yield (
                f"--loss_type real compares the completions of a prompt, and micro_batch_size ({size}) splits groups "
                f"of num_generations ({group}); use --micro_batch_size {-(-size // group) * group} and a "
                "--global_batch_size that is a multiple of it"
            )
        if not self._has_groups:
            yield f"--loss_type real needs groups; use --advantage_estimator grpo, not {self.advantage_estimator}"
        token_flags = [
            ("importance_sampling_level", self.loss.importance_sampling_level, "token"),
            ("top_entropy_quantile", self.top_entropy_quantile, 1.0),
            ("rollout_importance_sampling_mode", self.loss.correction.rollout_importance_sampling_mode, None),
            ("m2_threshold", self.loss.correction.m2_threshold, None),
        ]
        for name, value, neutral in token_flags:
            if value != neutral:
                yield (
                    f"--{name} {value} applies to single tokens, and --loss_type real scores whole completions; leave "
                    "it out"
                )

    @rule
    def groups_can_be_sampled_again(self) -> Faults:
        if not self.dynamic_sample:
            return
        if self.num_generations < 2:
            yield (
                "--dynamic_sample keeps prompts whose completions differ in reward, which is impossible with "
                f"num_generations ({self.num_generations}); use --num_generations 8, or --dynamic_sample false"
            )
        if self.max_resample_times < 1:
            yield (
                f"--dynamic_sample with --max_resample_times {self.max_resample_times} never samples again; use "
                "--max_resample_times 3, or --dynamic_sample false"
            )

    @rule
    def spare_groups_are_a_number(self) -> Faults:
        if not re.fullmatch("auto|[0-9]{1,9}", self.spare_groups):
            yield f"--spare_groups {self.spare_groups} must be auto or a number of groups; use --spare_groups auto"

    @property
    def most_spare_groups(self) -> int | None:
        """None: as many as earlier rollouts needed."""
        return None if self.spare_groups == "auto" else int(self.spare_groups)

    def notes(self) -> list[str]:
        """Return notes for the start-up log: flags without effect, as in ms-swift, and likely mistakes."""
        notes, loss, high = [], self.loss.name, self.loss.high
        tuned = {
            "sapo": self.loss.sapo.changed(),
            "vespo": self.loss.vespo.changed(),
            "fipo": self.loss.fipo.changed(),
            "real": self.loss.changed("real_tau"),
        }
        for of, changed in tuned.items():
            if changed and of != loss:
                notes.append(f"{', '.join(changed)}: for --loss_type {of}, without effect on --loss_type {loss}")
        if loss in ("sapo", "real", "vespo") and self.loss.epsilon_high is not None:
            notes.append(f"--epsilon_high has no effect on --loss_type {loss}, which does not clip ratios")
        if loss == "dppo_kl" and high >= 0.2:
            notes.append(
                f"--loss_type dppo_kl masks tokens at a KL above epsilon and epsilon_high ({high:g}), which a token "
                "seldom reaches; try --epsilon 0.05"
            )
        if loss == "luspo" and self.loss.importance_sampling_level != "sequence":
            notes.append(
                "--loss_type luspo is meant for ratios of whole completions: use --importance_sampling_level sequence, "
                "unless the sum of token losses is what you want"
            )
        if apart := self._averaged_over_completions():
            notes.append(
                f"{', '.join(apart)}: --importance_sampling_level sequence gives all tokens of a completion the same "
                "gradient, the mean of what each would get; use --importance_sampling_level sequence_token to keep "
                "them apart"
            )
        if loss == "cispo" and high < 1:
            notes.append(
                f"--loss_type cispo bounds token weights at epsilon_high itself ({high:g}), which is below 1, the "
                "weight of a token with an unchanged probability; --epsilon_high 5 is common"
            )
        return notes

    def _averaged_over_completions(self) -> list[str]:
        """Return what treats tokens differently, where the loss has the gradient of a completion's one ratio."""
        level, loss = self.loss.importance_sampling_level, self.loss.name
        if level != "sequence" or not (CLIPS_RATIO.get(loss) or loss == "sapo"):
            return []
        of_tokens = {
            f"--advantage_estimator {OPTIMAL_TOKEN}": self.advantage_estimator == OPTIMAL_TOKEN,
            "--loss_type fipo": loss == "fipo",
            f"--top_entropy_quantile {self.top_entropy_quantile:g}": self.top_entropy_quantile != 1,
            f"--m2_threshold {self.loss.correction.m2_threshold}": self.loss.correction.m2_threshold is not None,
            f"the teacher {self.teacher.name}": self.teacher.exists and not self.teacher.sdar.is_on,
        }
        return [typed for typed, is_given in of_tokens.items() if is_given]


def defaults_of(estimator: str) -> dict[str, Any]:
    """Return the flags that follow from the estimator where the user has not set them, as in ms-swift."""
    return {name: getattr(ESTIMATORS[estimator], name) for name in ("scale_rewards", "kl_in_reward")}

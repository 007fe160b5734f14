"""Sampling of completions, in training and in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, as_typed, flag, rule
from swift_megatron_grpo.settings.layout import ModelShape

_LEAST_TEMPERATURE = 0.01  # vLLM samples at this temperature below it
_MOST_TOKENS = 10_000_000  # no model has room for more
_SHARE = Range(0, 1.0, high=1, above_low=True)


class Sampling(Flags):
    """Sampling and length of completions; generation reads it, and the loss the temperature."""

    temperature: Annotated[
        float, AtLeast(0.01, use=1.0, why="vLLM samples at 0.01 below that, and the loss divides by the flag's value")
    ]
    top_p: Annotated[float, _SHARE]
    top_k: Annotated[int, AtLeast(-1, use=-1, why="-1 and 0 sample from all tokens")]
    min_p: Annotated[float, Range(0, 0.05, high=1, below_high=True, why="it is a share of the largest probability")] = (
        flag(
            0.0,
            "Sample no token whose probability is below this share of the likeliest token's. ms-swift has the flag in "
            "its other trainer. Default: 0, all tokens.",
            example="0.05",
        )
    )
    repetition_penalty: Annotated[float, Above(0, use=1.0)]
    max_length: Annotated[
        int | None, Range(2, 2048, high=_MOST_TOKENS, why="prompts are truncated to that many tokens")
    ]
    max_completion_length: Annotated[int, Range(1, 512, high=_MOST_TOKENS)]
    completion_length_limit_scope: str
    stop_words: list[str]
    structured_outputs_regex: str | None
    seed: Annotated[int, Range(0, 42, high=2**31 - 1, why="numpy and vLLM accept no other seeds")]
    seed_completions: bool = flag(
        False,
        "Give every completion its own seed, derived from --seed. Up to rounding, completions then do not "
        "depend on which server generates them, on what else it is generating, or on preemption: the noise of a token "
        "belongs to its seed and its position. In multi-turn conversations every turn has its own seed. "
        "Default: false.",
    )
    batch_invariant: bool = flag(
        False,
        "Completions and their log-probs do not depend on what else an engine generates, to the last bit. vLLM then "
        "computes with slower kernels. It is for --vllm_mode server, whose servers need the same flag, and for "
        "--seed_completions true. Default: false.",
    )
    rollout_logprobs_interval: Annotated[int, AtLeast(0, use=10, why="0 requests those of the first rollout only")] = (
        flag(
            10,
            "vLLM returns the log-probs of completions with every Nth rollout only, because they cost 4 to 11 %% of "
            "the time of generation of a small model: the steps on other rollouts log no rollout/k3_kl. 1: with every "
            "rollout. 0: with the first one only, which is always compared with the trainer's. The interval has no "
            "effect where the loss, --log_rollout_offpolicy_metrics or --rollout_dump reads them: they come with every "
            "rollout. Default: 10.",
            example="1",
        )
    )
    vllm_mode: str | None
    vllm_max_model_len: Annotated[int | None, Range(1, 4096, high=_MOST_TOKENS)]

    @rule
    def a_token_of_each_fits(self) -> Faults:
        # a server reports its own limit later
        if self.vllm_mode != "server" and self.vllm_max_model_len == 1:
            yield (
                "--vllm_max_model_len 1 has no room for a token of prompt and one of completion; use "
                f"--vllm_max_model_len {1024 + self.max_completion_length}"
            )

    @rule
    def batches_have_no_effect(self, shape: ModelShape) -> Faults:
        this = "--batch_invariant true"
        if not self.batch_invariant:
            return
        if self.vllm_mode != "server":
            yield (
                f"{this}: vLLM makes a whole process batch invariant. The training processes would get its NCCL, of "
                "one channel, and from some versions a torch.bmm without gradients; use --batch_invariant false, or "
                "--vllm_mode server with this flag for `swift rollout` as well"
            )
        if not self.seed_completions:
            yield f"{this}: without seeds, completions differ in every run; add --seed_completions true"
        if shape.linear_heads:
            yield f"{this}: vLLM has no such kernels for the linear attention of --model {shape.name}; leave it out"

    @rule
    def trainer_and_vllm_attend_to_the_same_tokens(self, shape: ModelShape) -> Faults:
        """Refuse sequences beyond a sliding window that mcore-bridge does not read; a server may have any length."""
        window, room = shape.unread_window, None if self.vllm_mode == "server" else self.vllm_max_model_len
        longest = None if self.max_length is None else self.max_length + self.max_completion_length
        fits = any(length is not None and window is not None and length <= window for length in (room, longest))
        if window is None or fits:
            return
        advice = f"--vllm_max_model_len {window}"
        if self.vllm_mode == "server":
            half = window // 2
            advice = f"--max_length {window - half} with --max_completion_length {half}"
        yield (
            f"--model {shape.name}: its config.json has a sliding window of {window} tokens, which vLLM uses and "
            f"mcore-bridge 1.6.5 does not read: longer sequences would be trained with full attention; use {advice}, "
            "or a model without a window"
        )

    def settings(self) -> SamplingConfig:
        return SamplingConfig(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_completion_length=self.max_completion_length,
            stop_words=tuple(self.stop_words),
            seed=self.seed if self.seed_completions else None,
            regex=self.structured_outputs_regex,
            limits_conversations=self.completion_length_limit_scope == "total",
        )

    def notes(self, longest: int) -> list[str]:
        """Return a note if the longest prompts leave vLLM less room than the longest completions may take."""
        needed, room = (self.max_length or 1) + longest, self.vllm_max_model_len
        if self.vllm_mode == "server" or room is None or room >= needed:
            return []
        prompt = "a token of prompt" if self.max_length is None else f"--max_length {self.max_length}"
        of_training = longest == self.max_completion_length
        completion = "max_completion_length" if of_training else "eval_max_completion_length"
        return [
            f"--vllm_max_model_len {room} is less than {prompt} and --{completion} {longest} together: "
            f" completions of longer prompts are cut at {room} tokens, prompt included, and a prompt that leaves no "
            f"room stops the run; --vllm_max_model_len {needed} has room for all"
        ]


class Evaluation(Flags):
    """Evaluation of the validation datasets; the loop reads it."""

    eval_before_train: bool = flag(
        False,
        "Evaluate before the first training step as well, for a base line. A run that resumes does not. "
        "Default: false; evaluation runs every --eval_steps and after the last step.",
    )
    eval_names: list[str] | None = flag(
        None,
        "Names of the datasets in --val_dataset, in their order, under which the metrics of each are "
        "logged. Default: the names of the files or hub ids, if there are several datasets.",
        example="math code",
    )
    eval_temperature: float | None = flag(
        None,
        "Temperature of completions in evaluation; 0 is greedy, with one completion of each prompt. "
        "Default: --temperature.",
        example="0.6",
    )
    eval_top_p: Annotated[float | None, _SHARE] = flag(
        None, "top_p of completions in evaluation. Default: --top_p.", example="0.95"
    )
    eval_max_completion_length: Annotated[int | None, AtLeast(1, use=512)] = flag(
        None, "Most tokens of a completion in evaluation. Default: --max_completion_length.", example="8192"
    )
    eval_correct_reward: str | None = flag(
        None,
        "The reward function of --reward_funcs that decides, for pass@k and maj@k, if a completion is "
        "correct. Default: the first.",
        example="accuracy",
    )
    eval_correct_from: float = flag(1.0, "Value of that function from which a completion is correct. Default: 1.")
    eval_iters: Annotated[int, AtLeast(-1, use=-1, why="-1 evaluates all prompts")]
    eval_steps: Annotated[int | None, AtLeast(1, use=100)]
    num_generations: int
    num_generations_eval: Annotated[int | None, AtLeast(1, use=8)]
    max_completion_length: int
    temperature: float
    val_dataset: list[str]
    split_dataset_ratio: Annotated[float, Range(0, 0.01, high=1, below_high=True)]
    rollout_only: bool

    @rule
    def something_is_evaluated(self) -> Faults:
        for name in self.changed("eval_")[:1]:
            text = f"{name} {as_typed(getattr(self, name[2:]))} has no effect"
            if self.rollout_only:
                yield f"{text} with --rollout_only true, which does not evaluate; leave one out"
            elif self.eval_iters == 0:
                yield f"{text} with --eval_iters 0, which does not evaluate; use --eval_iters -1"
            elif not self.val_dataset and self.split_dataset_ratio == 0:
                yield (
                    f"{text} without a dataset to evaluate on; use --val_dataset with a file or hub id, or "
                    "--split_dataset_ratio 0.01"
                )

    @rule
    def names_are_of_datasets(self) -> Faults:
        if self.eval_names is not None and not self.val_dataset and self.split_dataset_ratio:
            yield (
                "--eval_names names the datasets of --val_dataset, and --split_dataset_ratio has one without a name; "
                "use --val_dataset, or leave --eval_names out"
            )

    @rule
    def vllm_samples_at_this_temperature(self) -> Faults:
        temperature, generations = self.eval_temperature, self.num_generations_eval
        if temperature is None:
            return
        if not (temperature == 0 or _LEAST_TEMPERATURE <= temperature < math.inf):
            yield (
                f"--eval_temperature {temperature:g} must be 0, which is greedy, or at least {_LEAST_TEMPERATURE}; use "
                "--eval_temperature 0.6"
            )
        if temperature == 0 and generations is not None and generations > 1:
            yield (
                f"--eval_temperature 0 is greedy, so all --num_generations_eval {generations} completions of a prompt "
                "would be the same; use --num_generations_eval 1, or --eval_temperature 0.6"
            )

    @property
    def runs(self) -> bool:
        return self.eval_iters != 0 and bool(self.val_dataset or self.split_dataset_ratio)

    @property
    def generations(self) -> int:
        """Completions of a prompt; one if they are greedy."""
        return self.num_generations_eval or (1 if self.eval_temperature == 0 else self.num_generations)

    @property
    def length(self) -> int:
        """The most tokens of a completion in evaluation."""
        length = self.eval_max_completion_length
        return self.max_completion_length if length is None else length

    def sampling(self, training: Sampling) -> SamplingConfig:
        """Return training's sampling with what these flags change."""
        typed = {"temperature": self.eval_temperature, "top_p": self.eval_top_p}
        changed: dict[str, Any] = {name: value for name, value in typed.items() if value is not None}
        length = self.length
        return replace(training.settings(), max_completion_length=length, seed=training.seed, logprobs=False, **changed)

    def notes(self, names: list[str]) -> list[str]:
        """Return a line for the start-up log that says when and how this run evaluates."""
        if self.rollout_only or not self.runs:
            return []
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        when = ["before training"] if self.eval_before_train else []
        when += [f"every {self.eval_steps} steps"] if self.eval_steps else []
        how = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
        of = f" of {', '.join(names)}" if names else ""
        many = "1 completion" if self.generations == 1 else f"{self.generations} completions"
        return [f"evaluation{of}: {', '.join([*when, 'after the last step'])}; {many} of each prompt, {how}"]


def rounds_of(sizes: Sequence[int], most: int, at_once: int) -> int:
    """Return the number of rounds of an evaluation of datasets of these sizes. `most`: of each; 0: all prompts."""
    return sum(-(-(min(size, most) if most else size) // at_once) for size in sizes)

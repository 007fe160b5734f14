"""Encode the prompts of a dataset, and grade made-up responses with the reward functions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

from swift.megatron.trainers.utils import TrainerState
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.template import Template

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.requests import infer_request
from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, call_reward_functions
from swift_megatron_grpo.types import ModelImage, Prompt, Rollout

MOST_ROWS = 256  # that are encoded
_GRADED_ROWS = 4
_RESPONSE = "A made-up answer of a dry run."
_SOLUTIONS = ("solution", "answer", "ground_truth", "target")  # columns with a text that is tried as a response


@dataclass(frozen=True)
class Rows:
    """The dataset."""

    total: int
    prompts: list[Prompt]  # the first ones that training would take
    lengths: list[int]  # tokens of each of them, with those of its images
    image_tokens: list[int]  # tokens that stand for its images

    @property
    def median(self) -> int:
        return int(median(self.lengths))

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class Reward:
    """The scores of a reward function for made-up responses; the problem, if it failed."""

    name: str
    seconds: float = 0.0
    scores: tuple[float | None, ...] = ()
    problem: str | None = None


def read_rows(args: GRPOArguments, dataset: Any, template: Template) -> Rows:
    """Encode the first prompts, in the order of training.

    As in a run, an image counts as one token for --max_length, and then as many as the engine expands it to.
    """
    source = PromptSource(dataset, args.data_seed, args.train_dataloader_shuffle, template.template_meta.default_system)
    encoder = copy(template)
    encoder.max_length = None
    encoder.set_mode("vllm")
    prompts = source.take(min(MOST_ROWS, len(dataset)))
    lengths = [len(encoder.encode(infer_request(prompt))["input_ids"]) for prompt in prompts]
    if args.max_length is not None:
        lengths = [min(length, args.max_length) for length in lengths]
    reader = ImageReader(template) if args.most_images else None
    images = [[] if reader is None else reader.images(prompt.row) for prompt in prompts]
    image_tokens = [sum(image.num_tokens for image in shown) for shown in images]
    expanded = [length + added_tokens(reader, shown) for length, shown in zip(lengths, images, strict=True)]
    return Rows(len(dataset), prompts, expanded, image_tokens)


def added_tokens(reader: ImageReader | None, shown: Sequence[ModelImage]) -> int:
    """Return by how much the engine lengthens a prompt when it replaces the placeholders of these images."""
    return 0 if reader is None else sum(reader.format.length_of(image) - 1 for image in shown)


def try_rewards(args: GRPOArguments, rows: Rows, template: Template) -> list[Reward]:
    """Call every reward function with made-up responses to the first prompts: text, and the row's solution."""
    functions, _ = resolve_reward_funcs(args.reward_funcs, args=args)
    rollouts = [
        _rollout(prompt, text, template) for prompt in rows.prompts[:_GRADED_ROWS] for text in _answers(prompt.row)
    ]
    return [_try(name, function, rollouts) for name, function in zip(args.reward_names, functions, strict=False)]


def _answers(row: dict[str, Any]) -> list[str]:
    solutions = [row[name] for name in _SOLUTIONS if isinstance(row.get(name), str)]
    return [_RESPONSE, *solutions[:1]]


def _rollout(prompt: Prompt, text: str, template: Template) -> Rollout:
    tokens = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Rollout(prompt, [], tokens, None, text, "stop", weights_version=0)


def _try(name: str, function: Any, rollouts: Sequence[Rollout]) -> Reward:
    began = time.monotonic()
    try:
        scores = call_reward_functions(rollouts, RewardFunctions([name], [function]), TrainerState())
    except RewardError as error:
        return Reward(name, problem=str(error))
    return Reward(name, time.monotonic() - began, tuple(score for [score] in scores))

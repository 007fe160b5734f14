"""Encode the prompts of a dataset, and grade made-up responses with the reward functions."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from swift.megatron.trainers.utils import TrainerState
from swift.template import Template

from swift_megatron_grpo.arguments.environment import create_reward_functions
from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.reward_models import create_servers
from swift_megatron_grpo.cli.estimate.audio_part import CHUNK_TOKENS
from swift_megatron_grpo.data.encoders import encoder_of
from swift_megatron_grpo.data.image_reader import ImageReader, Medium
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.requests import infer_request
from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, call_reward_functions
from swift_megatron_grpo.settings.run import Data
from swift_megatron_grpo.types import ModelImage, ModelRecording, Prompt, Rollout, SoundPart

MOST_ROWS = 256  # that are encoded
_GRADED_ROWS = 4
_SECONDS = 30.0  # for the server of a reward model
_MEDIA = ("images", "videos", "audios")  # of which each has one placeholder in a prompt
_RESPONSE = "A made-up answer of a dry run."
_SOLUTIONS = ("solution", "answer", "ground_truth", "target")  # columns with a text that is tried as a response


@dataclass(frozen=True)
class Rows:
    total: int
    prompts: list[Prompt]  # the first ones that training would take
    lengths: list[int]  # tokens of each of them, with those of its images
    image_tokens: list[int]  # tokens that stand for its images and for frames of its videos
    heard_tokens: list[int]  # tokens that the audio part makes of its recordings, and of the sound of its videos


@dataclass(frozen=True)
class Reward:
    """The scores of a reward function for made-up responses; the problem, if it failed."""

    name: str
    seconds: float = 0.0
    scores: tuple[float | None, ...] = ()
    problem: str | None = None
    skipped: str | None = None  # why it was not called


def read_rows(args: GRPOArguments, dataset: Any, template: Template) -> Rows:
    """Encode the first prompts, in the order of training; an image has the tokens that the engine expands it to."""
    source = PromptSource(dataset, args.data_seed, args.of(Data).shuffles, template.template_meta.default_system)
    encoder = encoder_of(template)
    prompts = source.take(min(MOST_ROWS, len(dataset)))
    lengths = [len(encoder.encode(infer_request(prompt))["input_ids"]) for prompt in prompts]
    image_tokens, heard_tokens = [0] * len(prompts), [0] * len(prompts)
    if args.most_images or args.most_videos or args.most_recordings:
        reader = ImageReader(template)
        for place, prompt in enumerate(prompts):
            shown = reader.images(prompt.row)
            image_tokens[place] = sum(each.num_tokens for each in shown if isinstance(each, ModelImage))
            heard_tokens[place] = tokens_of_chunks(shown)
            lengths[place] += sum(map(reader.length_of, shown)) - sum(
                len(prompt.row.get(column) or ()) for column in _MEDIA
            )
    return Rows(len(dataset), prompts, lengths, image_tokens, heard_tokens)


def tokens_of_chunks(media: Iterable[Medium]) -> int:
    """Return the tokens of recordings, each once and filled up to whole chunks, as the audio part computes them."""
    heard = [each.sound if isinstance(each, SoundPart) else each for each in media]
    distinct = dict.fromkeys(each for each in heard if isinstance(each, ModelRecording))
    return sum(math.ceil(each.num_tokens / CHUNK_TOKENS) * CHUNK_TOKENS for each in distinct)


def try_rewards(args: GRPOArguments, rows: Rows, template: Template) -> list[Reward]:
    """Call every reward function with made-up responses to the first prompts: text, and the row's solution.

    Models of the ranks are not loaded, and servers get little time: nobody waits for a check.
    """
    servers = [server and replace(server, timeout=min(server.timeout, _SECONDS)) for server in create_servers(args)]
    functions = [*create_reward_functions(args), *servers]
    rollouts = []
    for prompt in rows.prompts[:_GRADED_ROWS]:
        solutions = [prompt.row[name] for name in _SOLUTIONS if isinstance(prompt.row.get(name), str)]
        for text in [_RESPONSE, *solutions[:1]]:
            tokens = template.tokenizer(text, add_special_tokens=False)["input_ids"]
            rollouts.append(Rollout(prompt, [], tokens, None, text, "stop", weights_version=0))
    rewards = []
    for name, function in zip(args.reward_names, functions, strict=False):
        if function is None:
            rewards.append(Reward(name, skipped="not loaded in a check"))
            continue
        began = time.monotonic()
        try:
            scores = call_reward_functions(rollouts, RewardFunctions([name], [function]), TrainerState())
        except RewardError as error:
            rewards.append(Reward(name, problem=str(error)))
        else:
            rewards.append(Reward(name, time.monotonic() - began, tuple(score for [score] in scores)))
    return rewards

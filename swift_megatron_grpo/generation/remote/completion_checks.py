"""Checks of the completions that a server sends: values that no engine of this run can have generated.

A server with broken memory, another tokenizer or another program on its port would otherwise change the training
without an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swift_megatron_grpo.data.images import is_portable
from swift_megatron_grpo.generation.protocol.messages import Completion

_ROUNDING = 1e-3  # a log-prob of 0 may be rounded up
_FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Expected:
    """The values that a run expects of a completion before it is generated."""

    weights_version: int
    vocab_size: int | None  # None: the model's config.json does not have it
    max_completion_length: int  # of one turn
    max_model_len: int  # of the server
    has_turns: bool
    takes_images: bool = False
    num_layers: int | None = None  # None: the model's config.json does not have it
    has_logprobs: bool = True  # they were requested


def problem_of(completion: Completion, expected: Expected) -> str | None:
    """Return what is wrong with a completion, None if it can be trained."""
    prompt, tokens, logprobs = completion.prompt_ids, completion.completion_ids, completion.logprobs
    sampled = len(tokens) if completion.sampled is None else sum(completion.sampled)
    problems = {
        f"its weights have version {completion.weights_version}, not {expected.weights_version}": (
            completion.weights_version != expected.weights_version
        ),
        "it has no prompt": not prompt,
        f"a token is not in the vocabulary of {expected.vocab_size}": not _in_vocabulary(
            [*prompt, *tokens], expected.vocab_size
        ),
        f"its finish_reason is {completion.finish_reason[:40]!r}": completion.finish_reason not in _FINISH_REASONS,
        "it has no log-probs": logprobs is None and sampled > 0 and expected.has_logprobs,
        "it has log-probs, which were not requested": logprobs is not None and not expected.has_logprobs,
        f"it has {len(logprobs or ())} log-probs for {sampled} sampled tokens": (
            len(logprobs or ()) != sampled and expected.has_logprobs
        ),
        "a log-prob is not finite, or above 0": not all(
            math.isfinite(value) and value <= _ROUNDING for value in logprobs or ()
        ),
    }
    problems |= _problems_of_experts(completion, expected.num_layers)
    problems |= (
        _problems_of_turns(completion, expected) if expected.has_turns else _problems_of_one_turn(completion, expected)
    )
    return next((problem for problem, is_present in problems.items() if is_present), None)


def _problems_of_one_turn(completion: Completion, expected: Expected) -> dict[str, bool]:
    prompt, tokens = len(completion.prompt_ids), len(completion.completion_ids)
    return {
        "it has no token": tokens == 0,
        f"it has {tokens} tokens, more than --max_completion_length {expected.max_completion_length}": (
            tokens > expected.max_completion_length
        ),
        f"prompt and completion have {prompt + tokens} tokens, more than its vllm_max_model_len "
        f"{expected.max_model_len}": prompt + tokens > expected.max_model_len,
        "it has the fields of a conversation, which was not requested": (
            completion.sampled is not None or completion.messages is not None or bool(completion.infos)
        ),
    }


def _problems_of_turns(completion: Completion, expected: Expected) -> dict[str, bool]:
    """Check what only conversations have. Environments may insert tokens, so their lengths are not limited here."""
    sampled, messages, turns = completion.sampled, completion.messages, completion.infos.get("num_turns")
    return {
        "it has no mask of sampled tokens": sampled is None,
        f"its mask has {len(sampled or ())} values for {len(completion.completion_ids)} tokens": (
            sampled is not None and len(sampled) != len(completion.completion_ids)
        ),
        "its messages are not those of a conversation": not messages or not all(map(_is_message, messages)),
        "its infos have no num_turns": type(turns) is not int or turns < 1,
        "its infos have a total_reward that is not a number": not isinstance(
            completion.infos.get("total_reward", 0.0), int | float | None
        ),
        "its infos have images that are not base64 of image files": (
            expected.takes_images and not _are_images(completion.infos.get("images", []))
        ),
    }


def _problems_of_experts(completion: Completion, num_layers: int | None) -> dict[str, bool]:
    """Check the shape of the experts; whether they can be chosen depends on the model (loop/checks/experts.py)."""
    rows, tokens = completion.routed_experts, len(completion.prompt_ids) + len(completion.completion_ids)
    if rows is None:
        return {}
    return {
        f"it has {len(rows)} rows of experts for {tokens} tokens": len(rows) != tokens - 1,
        f"its experts are of {rows.shape[1]} layers, not {num_layers}": num_layers not in (None, rows.shape[1]),
    }


def _are_images(images: object) -> bool:
    return isinstance(images, list) and all(map(is_portable, images))


def _is_message(message: dict[str, object]) -> bool:
    return isinstance(message.get("role"), str) and "content" in message


def _in_vocabulary(tokens: Sequence[int], size: int | None) -> bool:
    return not tokens or (min(tokens) >= 0 and (size is None or max(tokens) < size))

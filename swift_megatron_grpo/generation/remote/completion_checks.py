"""Checks of the completions that a server sends: values that no engine of this run can have generated."""

import math

from swift_megatron_grpo.data.images import is_portable
from swift_megatron_grpo.generation.protocol.messages import Completion, SentSequence
from swift_megatron_grpo.settings.config import SamplingConfig, ServerConfig
from swift_megatron_grpo.types import span_problem

_ROUNDING = 1e-3  # a log-prob of 0 may be rounded up
_FINISH_REASONS = ("stop", "length")


def problem_of(
    completion: Completion,
    versions: range,
    max_model_len: int,
    sampling: SamplingConfig,
    run: ServerConfig,
) -> str | None:
    """Return what is wrong with a completion, None if it can be trained.

    `versions`: those that its weights can have, `max_model_len`: of its server.
    """
    sequences: list[Completion | SentSequence] = [completion, *completion.earlier]
    oldest, newest = completion.weights_version, completion.newest_version
    expected = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    spans = span_problem([(each.spans, _sampled(each)) for each in sequences], oldest)
    of_all = {
        f"its weights have version {oldest}, not {expected}": oldest not in versions,
        f"its last weights have version {newest}, not {expected}": newest not in versions,
        f"it has spans, and {spans}": spans is not None,
        f"its finish_reason is {completion.finish_reason[:40]!r}": completion.finish_reason not in _FINISH_REASONS,
    }
    of_tokens = [_problems_of_tokens(sequence, sampling, run.model.get("vocab_size")) for sequence in sequences]
    if run.turns is None:
        of_kind = _problems_of_one_turn(completion, sampling.max_completion_length, max_model_len)
    else:
        of_kind = _problems_of_turns(completion, takes_images=run.images > 0)
    of_experts = _problems_of_experts(completion, run.model.get("num_hidden_layers"))
    problems = [item for each in (of_all, *of_tokens, of_experts, of_kind) for item in each.items()]
    return next((problem for problem, is_present in problems if is_present), None)


def _sampled(sequence: Completion | SentSequence) -> int:
    return len(sequence.completion_ids) if sequence.sampled is None else sum(sequence.sampled)


def _problems_of_tokens(
    sequence: Completion | SentSequence, sampling: SamplingConfig, vocabulary: int | None
) -> dict[str, bool]:
    prompt, tokens, logprobs, sampled = (
        sequence.prompt_ids,
        sequence.completion_ids,
        sequence.logprobs,
        _sampled(sequence),
    )
    return {
        "it has no prompt": not prompt,
        f"a token is not in the vocabulary of {vocabulary}": (
            min(prompt + tokens, default=0) < 0 or max(prompt + tokens, default=0) >= (vocabulary or math.inf)
        ),
        f"its mask has {len(sequence.sampled or ())} values for {len(tokens)} tokens": (
            sequence.sampled is not None and len(sequence.sampled) != len(tokens)
        ),
        "it has no log-probs": logprobs is None and sampled > 0 and sampling.logprobs,
        "it has log-probs, which were not requested": logprobs is not None and not sampling.logprobs,
        f"it has {len(logprobs or ())} log-probs for {sampled} sampled tokens": (
            len(logprobs or ()) != sampled and sampling.logprobs
        ),
        "a log-prob is not finite, or above 0": not all(
            math.isfinite(value) and value <= _ROUNDING for value in logprobs or ()
        ),
    }


def _problems_of_experts(completion: Completion, layers: int | None) -> dict[str, bool]:
    """Check the shape. Whether the experts can be chosen depends on the model (loop/checks/experts.py)."""
    rows, tokens = completion.routed_experts, len(completion.prompt_ids) + len(completion.completion_ids)
    if rows is None:
        return {}
    return {
        f"it has {len(rows)} rows of experts for {tokens} tokens": len(rows) != tokens - 1,
        f"its experts are of {rows.shape[1]} layers, not {layers}": layers not in (None, rows.shape[1]),
    }


def _problems_of_one_turn(completion: Completion, most_tokens: int, max_model_len: int) -> dict[str, bool]:
    prompt, tokens = len(completion.prompt_ids), len(completion.completion_ids)
    return {
        "it has no token": tokens == 0,
        f"it has {tokens} tokens, more than --max_completion_length {most_tokens}": tokens > most_tokens,
        f"prompt and completion have {prompt + tokens} tokens, more than its vllm_max_model_len {max_model_len}": (
            prompt + tokens > max_model_len
        ),
        "it has the fields of a conversation, which was not requested": (
            completion.sampled is not None
            or completion.messages is not None
            or bool(completion.infos or completion.earlier)
        ),
    }


def _problems_of_turns(completion: Completion, takes_images: bool) -> dict[str, bool]:
    """Check what only conversations have. Environments may insert tokens, so their lengths are not limited here."""
    sampled, messages, infos = completion.sampled, completion.messages, completion.infos
    turns, images = infos.get("num_turns"), infos.get("images", [])
    return {
        "it has no mask of sampled tokens": sampled is None,
        "its messages are not those of a conversation": not messages
        or not all(isinstance(message.get("role"), str) and "content" in message for message in messages),
        "its infos have no num_turns": type(turns) is not int or turns < 1,
        f"it has {1 + len(completion.earlier)} sequences of {turns} turns": (
            type(turns) is int and 1 + len(completion.earlier) > turns
        ),
        "its infos have a total_reward that is not a number": not isinstance(
            infos.get("total_reward", 0.0), int | float | None
        ),
        "its infos have images that are not base64 of image files": (
            takes_images and not (isinstance(images, list) and all(map(is_portable, images)))
        ),
    }

"""Schedulers that answer all completions of a prompt at once, such as a tree whose branches share what they begin with.

They override ms-swift's `async_infer`, which gets one request for each completion and returns a conversation for each.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, multi_turns

from swift_megatron_grpo.generation.conversations.turns import Turn


def answers_groups(scheduler: str | None) -> bool:
    """Return False also for a scheduler that only servers have."""
    return scheduler in multi_turns and overrides_async_infer(multi_turns[scheduler])


def overrides_async_infer(scheduler: type[MultiTurnScheduler]) -> bool:
    return bool(scheduler.async_infer is not MultiTurnScheduler.async_infer)


def members(first: RolloutInferRequest, number: int) -> list[RolloutInferRequest]:
    """Return the requests of all completions of a prompt. `first`: that of its first one, whose id ends with -0."""
    prompt = str(first.uuid).removesuffix("-0")
    return [replace(deepcopy(first), uuid=f"{prompt}-{place}") for place in range(number)]


def turns_of(output: RolloutOutput, recorded: Sequence[Turn]) -> list[Turn]:
    """Return the turns of one conversation, of all that its prompt's conversations have had.

    Each has the tokens of one of its responses. Of several turns with these it is one that follows the turn before and
    leads to the last one; of several again the shortest, because others are deeper, in other branches. A scheduler may
    have rewritten what is in between; then any does.
    """
    chain: list[Turn] = []
    end = list(output.response.prompt_token_ids or ())  # what its last turn continues
    responses = output.response_token_ids or [output.response.choices[0].token_ids]
    for response in map(list, filter(None, responses)):  # the last one is empty if the engine had no room for it
        sampled = [turn for turn in recorded if turn.completion_ids == response] or [
            turn for turn in recorded if _is_behind_prefix(response, turn)
        ]
        if not sampled:
            raise ValueError(
                f"the scheduler returned {len(response)} tokens that the engine did not sample in one turn"
            )
        before = chain[-1].tokens if chain else []
        chain.append(min(sampled, key=partial(_distance, before=before, end=end)))
    return chain


def _distance(turn: Turn, before: list[int], end: list[int]) -> tuple[bool, bool, int]:
    """Return how far a turn is from one that continues `before` and leads to `end`; the least is the nearest."""
    follows = turn.prompt_ids[: len(before)] == before
    leads = turn.prompt_ids == end or turn.tokens == end[: turn.length]
    return not follows, not leads, turn.length


def _is_behind_prefix(response: list[int], turn: Turn) -> bool:
    """Return True if a turn sampled a response but for its beginning, the template's prefix, which ends the prompt."""
    prefix = len(response) - len(turn.completion_ids)
    return (
        0 < prefix < len(response)
        and response[prefix:] == turn.completion_ids
        and response[:prefix] == turn.prompt_ids[-prefix:]
    )

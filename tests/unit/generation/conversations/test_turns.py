"""A token is trained only where the policy sampled it, with the log-prob it had there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.generation.conversations.turns import Message, Turn, branches, join, turn_seed

QUESTION, TOOL = [1, 2, 3], [90, 91]


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(prompt, completion, [-float(token) for token in completion])


def test_every_turn_of_every_conversation_has_its_own_seed() -> None:
    seeds = [turn_seed(conversation, number) for conversation in (1, 2, 3) for number in (1, 2, 3)]
    assert len(set(seeds)) == 9 and seeds == [turn_seed(c, n) for c in (1, 2, 3) for n in (1, 2, 3)]
    assert turn_seed(None, 1) is None and all(0 <= seed < 2**63 for seed in seeds if seed is not None)


def test_a_single_turn_is_its_prompt_and_completion() -> None:
    joined = join([turn(QUESTION, [10, 11])])
    assert (joined.prompt_ids, joined.completion_ids, joined.sampled) == (QUESTION, [10, 11], [True, True])
    assert joined.logprobs == [-10, -11] and joined.lost_turns == 0


def test_tokens_of_a_tool_are_not_sampled() -> None:
    joined = join([turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12])])
    assert joined.prompt_ids == QUESTION and joined.completion_ids == [10, 11, *TOOL, 12]
    assert joined.sampled == [True, True, False, False, True]
    assert joined.logprobs == [-10, -11, -12]


def test_tokens_cut_off_by_a_scheduler_are_left_out() -> None:
    """ms-swift's math_tip_trick cuts an answer and continues with a hint in its place."""
    joined = join([turn(QUESTION, [10, 11, 12]), turn([*QUESTION, 10, *TOOL], [13])])
    assert joined.completion_ids == [10, *TOOL, 13] and joined.sampled == [True, False, False, True]
    assert joined.logprobs == [-10, -13] and joined.lost_turns == 0


def test_a_rewritten_history_is_not_trained() -> None:
    """The policy saw another prefix when it sampled the first turn."""
    joined = join([turn(QUESTION, [10, 11]), turn([7, 8, 10, 11, *TOOL], [12])])
    assert joined.prompt_ids == [7, 8, 10, 11, *TOOL] and joined.completion_ids == [12]
    assert joined.logprobs == [-12] and joined.lost_turns == 1


def test_a_rewritten_history_begins_another_sequence() -> None:
    first, second = branches([turn(QUESTION, [10, 11]), turn([7, 8, 10, 11, *TOOL], [12])])
    assert (first.prompt_ids, first.completion_ids, first.logprobs) == (QUESTION, [10, 11], [-10, -11])
    assert (second.prompt_ids, second.completion_ids, second.logprobs) == ([7, 8, 10, 11, *TOOL], [12], [-12])
    assert first.lost_turns == second.lost_turns == 0


def test_turns_that_only_append_are_one_sequence() -> None:
    turns = [turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12])]
    assert branches(turns) == [join(turns)]


def test_a_fork_trains_what_it_continues_once() -> None:
    """Two answers to one context: the second one begins a sequence, in which the first turn is context."""
    turns = [turn(QUESTION, [10]), turn([*QUESTION, 10, 90], [11]), turn([*QUESTION, 10, 91], [12])]
    first, second = branches(turns)
    assert first.completion_ids == [10, 90, 11] and first.sampled == [True, False, True]
    assert second.prompt_ids == [*QUESTION, 10, 91] and second.completion_ids == [12]
    later = turn([*QUESTION, 10, 90, 11, 92], [13])  # of the first branch, which is the last sequence then
    assert [each.completion_ids for each in branches([*turns, later])] == [[12], [10, 90, 11, 92, 13]]


tokens = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(0, 9), tokens, tokens), min_size=1, max_size=8))
def test_every_sampled_token_stands_once_in_its_own_context(steps: list[tuple[int, list[int], list[int]]]) -> None:
    turns: list[Turn] = []
    for number, (parent, added, sampled) in enumerate(steps):
        before = turns[parent % len(turns)].tokens if turns and parent else []
        turns.append(Turn([*before, *added], sampled, [-100.0 * number - place for place in range(len(sampled))]))
    found = sorted((each for each in branches(turns)), key=lambda each: each.logprobs or [])
    logprobs = [value for each in found for value in each.logprobs or []]
    assert sorted(logprobs) == sorted(value for each in turns for value in each.logprobs or [])
    for each in found:
        whole = [*each.prompt_ids, *each.completion_ids]
        places = [len(each.prompt_ids) + place for place, is_sampled in enumerate(each.sampled) if is_sampled]
        for place, logprob in zip(places, each.logprobs or [], strict=True):
            number, offset = divmod(round(-logprob), 100)
            assert whole[: place + 1] == turns[number].tokens[: len(turns[number].prompt_ids) + offset + 1]


def test_a_loss_mask_of_the_scheduler_excludes_tokens() -> None:
    turns = [turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12, 10, 11])]
    joined = join(turns, [Message([10, 11], [False, True]), Message([12, 10, 11], [True, True, False])])
    assert joined.prompt_ids == [*QUESTION, 10] and joined.completion_ids == [11, *TOOL, 12, 10, 11]
    assert joined.sampled == [True, False, False, True, True, False]
    assert joined.logprobs == [-11, -12, -10]


def test_a_response_prefix_of_the_template_is_part_of_the_message() -> None:
    """`<think></think>` with thinking off: in the prompt while the turn is sampled, in the message afterwards."""
    turns = [turn([*QUESTION, 50], [10]), turn([*QUESTION, 50, 10, *TOOL, 50], [11, 12])]
    joined = join(turns, [Message([50, 10], [False, True]), Message([50, 11, 12], [False, True, False])])
    assert joined.completion_ids == [10, *TOOL, 50, 11, 12]
    assert joined.sampled == [True, False, False, False, True, False] and joined.logprobs == [-10, -11]


def test_one_message_may_span_two_turns() -> None:
    turns = [turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12])]
    joined = join(turns, [Message([10, 11, *TOOL, 12], [True, False, False, False, True])])
    assert joined.completion_ids == [10, 11, *TOOL, 12] and joined.sampled == [True, False, False, False, True]


def test_turns_without_log_probs_join_to_none() -> None:
    joined = join([Turn(QUESTION, [10], None), Turn([*QUESTION, 10, *TOOL], [11], None)])
    assert joined.logprobs is None and joined.sampled == [True, False, False, True]


@pytest.mark.parametrize("logprobs", [None, [], [-1.0]])
def test_a_turn_without_all_log_probs_joins_to_none(
    logprobs: list[float] | None,
) -> None:
    """It does so also if no token of the turn is left."""
    turns = [Turn(QUESTION, [10, 11], logprobs)]
    masked = join(turns, [Message([10, 11], [False, False])])
    assert masked.logprobs is None and not any(masked.sampled)
    rewritten = join([*turns, turn([7, 8, *TOOL], [12])])
    assert rewritten.logprobs is None and rewritten.sampled == [True] and rewritten.lost_turns == 1


def test_a_conversation_has_as_many_log_probs_as_trained_tokens() -> None:
    """Masked tokens have none."""
    joined = join(
        [turn(QUESTION, [10, 11]), Turn([*QUESTION, 10, 11, *TOOL], [], None)], [Message([10, 11], [False] * 2)]
    )
    assert joined.logprobs == [] and not any(joined.sampled)


def test_the_experts_of_a_conversation_are_those_of_its_last_turn() -> None:
    """Its prompt holds all earlier tokens, of tools and environments, too."""
    first, last = np.zeros((3, 2, 2), np.uint8), np.ones((9, 2, 2), np.uint8)
    turns = [Turn(QUESTION, [10], [-1.0], first), Turn([*QUESTION, 10, *TOOL], [11], [-1.0], last)]
    assert join(turns).routed_experts is last
    assert join(turns[:1]).routed_experts is first and join([Turn(QUESTION, [10], None)]).routed_experts is None


def test_spans_of_turns_follow_their_tokens() -> None:
    """Tokens that a scheduler cuts off, or excludes from training, are no part of a span."""
    first = replace(turn(QUESTION, [10, 11, 12]), spans=[(4, 1), (6, 2)])
    second = replace(turn([*QUESTION, 10, 11, *TOOL], [13, 14]), spans=[(6, 1), (8, 1)])
    assert join([first, second]).spans == [(4, 1), (6, 2), (8, 1)]
    assert join([first, second], [Message([10, 11], [False, True])]).spans == [(6, 2), (8, 1)]
    assert [each.spans for each in branches([first, second])] == [[(4, 1), (6, 2)], [(6, 1), (8, 1)]]
    assert join([turn(QUESTION, [10])]).spans is None

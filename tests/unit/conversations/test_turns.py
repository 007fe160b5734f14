"""A token is trained where the policy sampled it, with the log-prob it had there, and no other token is."""

from __future__ import annotations

from swift_megatron_grpo.conversations.turns import Message, Turn, join, turn_seed

QUESTION, TOOL = [1, 2, 3], [90, 91]


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(prompt, completion, [-float(token) for token in completion])


def test_turns_have_seeds_of_their_own() -> None:
    seeds = [turn_seed(conversation, number) for conversation in (1, 2, 3) for number in (1, 2, 3)]
    assert len(set(seeds)) == 9 and seeds == [turn_seed(c, n) for c in (1, 2, 3) for n in (1, 2, 3)]
    assert turn_seed(None, 1) is None and all(0 <= seed < 2**63 for seed in seeds if seed is not None)


def test_one_turn() -> None:
    said = join([turn(QUESTION, [10, 11])])
    assert (said.prompt_ids, said.completion_ids, said.sampled) == (QUESTION, [10, 11], [True, True])
    assert said.logprobs == [-10, -11] and said.lost_turns == 0


def test_the_words_of_a_tool_are_not_sampled() -> None:
    said = join([turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12])])
    assert said.prompt_ids == QUESTION and said.completion_ids == [10, 11, *TOOL, 12]
    assert said.sampled == [True, True, False, False, True]
    assert said.logprobs == [-10, -11, -12]


def test_what_a_scheduler_cut_off_is_not_there() -> None:
    """ms-swift's math_tip_trick cuts an answer and goes on with a hint in its place."""
    said = join([turn(QUESTION, [10, 11, 12]), turn([*QUESTION, 10, *TOOL], [13])])
    assert said.completion_ids == [10, *TOOL, 13] and said.sampled == [True, False, False, True]
    assert said.logprobs == [-10, -13] and said.lost_turns == 0


def test_a_rewritten_history_is_not_trained() -> None:
    """The policy saw another beginning when it sampled the first turn."""
    said = join([turn(QUESTION, [10, 11]), turn([7, 8, 10, 11, *TOOL], [12])])
    assert said.prompt_ids == [7, 8, 10, 11, *TOOL] and said.completion_ids == [12]
    assert said.logprobs == [-12] and said.lost_turns == 1


def test_a_scheduler_takes_tokens_out_of_the_loss() -> None:
    turns = [turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12, 10, 11])]
    said = join(turns, [Message([10, 11], [False, True]), Message([12, 10, 11], [True, True, False])])
    assert said.prompt_ids == [*QUESTION, 10] and said.completion_ids == [11, *TOOL, 12, 10, 11]
    assert said.sampled == [True, False, False, True, True, False]
    assert said.logprobs == [-11, -12, -10]


def test_a_prefix_of_the_template_is_part_of_the_message() -> None:
    """As `<think></think>` where thinking is off: in the prompt when the turn is sampled, in the message afterwards."""
    turns = [turn([*QUESTION, 50], [10]), turn([*QUESTION, 50, 10, *TOOL, 50], [11, 12])]
    said = join(turns, [Message([50, 10], [False, True]), Message([50, 11, 12], [False, True, False])])
    assert said.completion_ids == [10, *TOOL, 50, 11, 12]
    assert said.sampled == [True, False, False, False, True, False] and said.logprobs == [-10, -11]


def test_a_message_that_goes_on_over_two_turns() -> None:
    turns = [turn(QUESTION, [10, 11]), turn([*QUESTION, 10, 11, *TOOL], [12])]
    said = join(turns, [Message([10, 11, *TOOL, 12], [True, False, False, False, True])])
    assert said.completion_ids == [10, 11, *TOOL, 12] and said.sampled == [True, False, False, False, True]


def test_without_log_probs() -> None:
    said = join([Turn(QUESTION, [10], None), Turn([*QUESTION, 10, *TOOL], [11], None)])
    assert said.logprobs is None and said.sampled == [True, False, False, True]

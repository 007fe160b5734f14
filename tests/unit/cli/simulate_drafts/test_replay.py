"""Drafts against a scan of all texts, and the replay against one that keeps no index, on random rollouts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.cli.simulate_drafts.replay import Completion, Tally, replay
from swift_megatron_grpo.generation.vllm.texts import MOST_MATCHED

PROMPTS = ((1, 2, 3), (3, 1))


# ---- the reference: written without an index, from the rules alone


@dataclass
class Written:
    """A token in the order in which tokens were written, with its text up to and after it."""

    text: list[int]
    place: int


def scanned(written: list[Written], text: list[int], most: int) -> list[int]:
    """Scan all tokens for those whose past ends like `text`: longest, then most frequent next token, then newest."""

    def matched(one: Written) -> int:
        size = 0
        while size < MOST_MATCHED and size < one.place and size < len(text):
            if one.text[one.place - 1 - size] != text[-1 - size]:
                break
            size += 1
        return size

    sizes = [matched(one) for one in written]
    longest = max(sizes, default=0)
    if not longest:
        return []
    found = [one for one, size in zip(written, sizes, strict=True) if size == longest]
    following = [one.text[one.place] for one in found]
    most_often = max(following.count(token) for token in following)
    best = next(one for one in reversed(found) if following.count(one.text[one.place]) == most_often)
    return best.text[best.place : best.place + most]


@dataclass
class Decoding:
    prompt: tuple[int, ...]
    turns: list[tuple[list[int], list[int]]]  # sampled tokens, and what the environment answered
    text: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    turn: int = 0
    place: int = 0


def turns_of(completion: Completion) -> list[tuple[list[int], list[int]]]:
    turns: list[tuple[list[int], list[int]]] = []
    flags = completion.sampled or [True] * len(completion.tokens)
    before = False
    for token, is_sampled in zip(completion.tokens, flags, strict=True):
        if is_sampled and not before:
            turns.append(([], []))
        turns[-1][0 if is_sampled else 1].append(token)
        before = is_sampled
    return turns


def decoded(rollout: list[Completion], earlier: list[Completion], depth: int, slots: int) -> dict[int, Tally]:
    """Decode step by step, and scan all that was written of a prompt for every draft."""
    written: dict[tuple[int, ...], list[Written]] = {}

    def write(prompt: tuple[int, ...], text: list[int], begin: int) -> None:
        if prompt not in written:
            written[prompt] = [Written(list(prompt), place) for place in range(1, len(prompt))]
        written[prompt] += [Written(text, place) for place in range(begin, len(text))]

    for completion in earlier:
        write(completion.prompt, [*completion.prompt, *completion.tokens], len(completion.prompt))
    queue = [Decoding(c.prompt, turns_of(c), list(c.prompt)) for c in rollout if c.tokens]
    running: list[Decoding] = []
    tallies: dict[int, Tally] = {}
    while queue or running:
        running += [queue.pop(0) for _ in range(min(len(queue), slots - len(running)))]
        step = Tally(steps=1)
        for one in running:
            sampled, answer = one.turns[one.turn]
            right = 0
            while right < len(one.draft) and one.draft[right : right + 1] == sampled[one.place + right :][:1]:
                right += 1
            new = sampled[one.place : one.place + right + 1]
            step += Tally(0, 1, len(new), len(one.draft), right)
            one.place += len(new)
            is_over = one.place == len(sampled)
            begin = len(one.text)
            one.text += new + (answer if is_over else [])
            write(one.prompt, one.text, begin)
            if is_over:
                one.turn, one.place = one.turn + 1, 0
        before = tallies.get(len(running), Tally())
        tallies[len(running)] = before + step
        running = [one for one in running if one.turn < len(one.turns)]
        for one in running:
            one.draft = scanned(written[one.prompt], one.text, depth) if one.place and depth else []
    return tallies


completions = st.builds(
    lambda prompt, tokens, flags: Completion(prompt, tokens, flags and [True, *flags[1 : len(tokens)]]),
    st.sampled_from(PROMPTS),
    st.lists(st.integers(1, 3), min_size=1, max_size=16),
    st.one_of(st.none(), st.lists(st.booleans(), min_size=16, max_size=16)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(completions, min_size=1, max_size=5), st.lists(completions, max_size=3), st.integers(0, 4),
       st.integers(1, 5))  # fmt: skip
def test_a_replay_counts_what_decoding_with_a_scan_counts(
    rollout: list[Completion], earlier: list[Completion], depth: int, slots: int
) -> None:
    found = replay(rollout, earlier, depth, slots)
    assert found == decoded(rollout, earlier, depth, slots)
    tokens = sum(sum(c.sampled or [True] * len(c.tokens)) for c in rollout)
    assert sum(tally.tokens for tally in found.values()) == tokens


def test_without_drafts_steps_are_the_longest_completion() -> None:
    rollout = [Completion((1,), list(range(2, 2 + size))) for size in (3, 7, 5)]
    assert replay(rollout, [], 0, 3) == {3: Tally(3, 9, 9), 2: Tally(2, 4, 4), 1: Tally(2, 2, 2)}
    assert sum(tally.steps for tally in replay(rollout, [], 0, 1).values()) == 15


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_a_completion_seen_before_takes_depth_plus_one_tokens_a_step(depth: int) -> None:
    tokens = random.Random(0).sample(range(100, 1000), 1 + 8 * (depth + 1))
    again = Completion((1, 2), tokens)
    [tally] = replay([again], [again], depth, 1).values()
    assert tally == Tally(9, 9, len(tokens), 8 * depth, 8 * depth)


def test_drafts_come_from_the_own_prompt_alone() -> None:
    tokens = list(range(100, 120))
    elsewhere = Completion((1, 2), tokens)
    tallies = replay([Completion((7, 8), tokens)], [elsewhere], 4, 1)
    assert tallies == {1: Tally(20, 20, 20, 0, 0)}


def test_a_sibling_ahead_in_the_text_is_drafted_from() -> None:
    text = list(range(100, 140))
    ahead, behind = Completion((1,), text), Completion((1,), [7, *text])
    together = replay([ahead, behind], [], 4, 2)
    assert sum(tally.accepted for tally in together.values()) > 0
    alone = replay([behind], [], 4, 1)
    assert sum(tally.accepted for tally in alone.values()) == 0

"""A draft is accepted where it is the sample of its position, compared with a loop on random batches."""

from __future__ import annotations

import random
from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.generation.vllm.verification import accepted

VOCABULARY, MOST = 3, 4


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, MOST), min_size=1, max_size=6).filter(any), st.integers(0, 2**32 - 1))
def test_tokens_are_those_of_a_loop(counts: list[int], seed: int) -> None:
    """Logits are not looked at but by greedy requests: their argmax is another token than the sample."""
    chance = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(number)]

    samples, likeliest, drafts = ([tokens(count) for count in counts] for _ in range(3))
    bonus, greedy = tokens(len(counts)), [chance.random() < 0.3 for _ in counts]
    expected = []
    for place, count in enumerate(counts):
        truth = [*(likeliest if greedy[place] else samples)[place], bonus[place]]
        right = 0
        while right < count and drafts[place][right] == truth[right]:
            right += 1
        expected.append(truth[: right + 1])
    sampled, argmax, drafted = (torch.tensor(list(chain(*tokens))) for tokens in (samples, likeliest, drafts))
    logits = torch.nn.functional.one_hot(argmax, VOCABULARY).float()
    found = accepted(lambda _: sampled, drafted, counts, max(counts), logits, torch.tensor(bonus)[:, None],
                     torch.tensor(greedy))  # fmt: skip
    assert found.dtype == torch.int32 and found.shape == (len(counts), max(counts) + 1)
    assert [[token for token in row if token != -1] for row in found.tolist()] == expected
    assert all(row[len(kept) :] == [-1] * (len(row) - len(kept)) for row, kept in
               zip(found.tolist(), expected, strict=True))  # fmt: skip


def test_without_a_temperature_all_requests_are_greedy() -> None:
    logits = torch.eye(3)[[2, 0]]

    def sample(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a greedy request needs no noise")

    found = accepted(sample, torch.tensor([2, 1]), [2], 2, logits, torch.tensor([[1]]), None)
    assert found.tolist() == [[2, 0, -1]]


def test_a_placeholder_that_vllm_schedules_is_never_accepted() -> None:
    """vLLM 0.32 pads the drafts of a newly admitted request with -1."""
    logits = torch.zeros(2, 3)
    found = accepted(lambda _: torch.tensor([1, 1]), torch.tensor([-1, -1]), [2], 2, logits, torch.tensor([[0]]),
                     torch.tensor([False]))  # fmt: skip
    assert found.tolist() == [[1, -1, -1]]

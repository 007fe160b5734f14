"""Drafts of requests, and the bound of what is remembered. tests/e2e/test_speculation.py has the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.generation.vllm.drafts import (
    COMPLETIONS_OF_A_PROMPT,
    INDEXED_TOKENS,
    ROWS,
    GroupDrafts,
    History,
)
from swift_megatron_grpo.types import DraftCounts

LONGEST, STOP = 100, 99


class Step:
    """The state of vLLM's first model runner that drafts read: the requests of a step, and their tokens."""

    def __init__(self, most: int = 4, indexed_tokens: int = INDEXED_TOKENS, on_server: bool = False) -> None:
        self.requests: dict[str, Any] = {}
        self.drafts = GroupDrafts(
            SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=most),
                model_config=SimpleNamespace(max_model_len=LONGEST),
            ),
            indexed_tokens,
        )
        self.drafts.follow(self, remembers=on_server)

    @property
    def input_batch(self) -> Any:
        return SimpleNamespace(req_ids=list(self.requests))

    def start(self, name: str, prompt: list[int], most: int = 50, seed: int | None = 1, **settings: Any) -> None:
        usual = {"min_p": 0.0, "structured_outputs": None, "all_stop_token_ids": {STOP}}
        params = SimpleNamespace(seed=seed, max_tokens=most, **{**usual, **settings})
        self.requests[name] = SimpleNamespace(prompt_token_ids=prompt, output_token_ids=[], sampling_params=params)

    def sample(self, **tokens: list[int]) -> dict[str, list[int]]:
        for name, new in tokens.items():
            self.requests[name].output_token_ids.extend(new)
        drafts = self.drafts.propose([tokens.get(name, []) for name in self.requests])
        return dict(zip(self.requests, drafts, strict=True))


def test_drafts_come_from_the_prompt_the_group_and_the_history() -> None:
    step = Step()
    step.drafts.remember([([1, 2, 3], [50, 51, 52, 53]), ([9, 9], [50, 60])])
    step.start("a", [1, 2, 3])
    step.start("b", [1, 2, 3])
    assert step.sample(a=[1], b=[50]) == {"a": [2, 3, 1], "b": [51, 52, 53]}  # the prompt and "a" itself; the history
    assert step.sample(a=[70, 71], b=[70]) == {"a": [], "b": [71]}  # a sibling that is ahead, in the same step
    assert step.drafts.take_counts() == DraftCounts(tokens=0, steps=4, drafted=7)
    assert step.drafts.take_counts() == DraftCounts()


def test_no_draft_goes_beyond_a_limit_of_length() -> None:
    step = Step(most=8)
    step.start("short", [1, 2, 3, 4, 5, 6, 7, 8], most=4)
    step.start("long", [*range(1, 97)], most=50)
    assert step.sample(short=[1], long=[1]) == {"short": [2, 3], "long": [2, 3]}
    assert step.sample(short=[2, 3], long=[2, 3]) == {"short": [], "long": []}


def test_many_running_requests_get_fewer_drafts_each() -> None:
    for running, depth in ((1, 5), (ROWS // 5, 5), (ROWS // 4, 4), (ROWS, 1), (ROWS + 1, 0)):
        step = Step(most=5)
        for number in range(running):
            step.start(str(number), [100 + number, 1, 2, 3, 4, 5, 6, 7])
        drafts = step.sample(**{name: [1] for name in step.requests})
        assert list(drafts.values()) == [[2, 3, 4, 5, 6][:depth]] * running


def test_a_request_without_a_seed_or_without_a_token_is_not_drafted_for() -> None:
    step = Step()
    step.start("greedy score", [1, 2, 1, 2], seed=None)
    step.start("in its prompt", [1, 2, 1, 2])
    assert step.sample(**{"greedy score": [1]}) == {"greedy score": [], "in its prompt": []}


@pytest.mark.parametrize("settings", [{"min_p": 0.1}, {"structured_outputs": "a regex"}])
def test_a_request_whose_drafts_vllm_would_not_sample_alike_has_none(settings: dict[str, Any]) -> None:
    step = Step()
    step.start("a", [1, 2, 1, 2], **settings)
    assert step.sample(a=[1]) == {"a": []}


def test_a_name_that_is_used_again_is_another_request() -> None:
    step = Step()
    step.start("0", [1, 2, 3])
    step.sample(**{"0": [4, 5, 6]})
    step.start("0", [8, 9])
    assert step.sample(**{"0": [8]}) == {"0": [9, 8]}


def test_a_server_drafts_from_what_it_has_completed() -> None:
    step = Step(on_server=True)
    step.start("a", [1, 2, 3])
    step.sample(a=[50, 51])
    step.sample(a=[52, 53, STOP, 54])  # what is behind the stop token was sampled, and is no part of the completion
    del step.requests["a"]
    step.start("b", [1, 2, 3])
    step.start("other", [1, 2])
    assert step.sample(b=[50], other=[50]) == {"b": [51, 52, 53, STOP], "other": []}
    assert step.drafts.take_counts() == DraftCounts(tokens=5 + 2, steps=4, drafted=4)
    assert step.drafts.take_counts() == DraftCounts()


def test_a_server_drafts_from_requests_of_a_prompt_that_have_ended() -> None:
    step = Step(on_server=True)
    step.start("a", [1, 2])
    step.start("b", [1, 2])
    step.sample(a=[60, 61, 62], b=[7])
    del step.requests["a"]
    assert step.sample(b=[60]) == {"b": [61, 62]}


def test_a_server_forgets_requests_and_stays_within_its_bounds() -> None:
    """Each request has a prompt of its own, almost as long as the context, and is cancelled."""
    step = Step(on_server=True, indexed_tokens=500)
    step.drafts._history = History(20_000)
    for number in range(300):
        step.start(str(number), [*range(number, number + LONGEST - 3)])
        step.sample(**{str(number): [number]})
        assert step.drafts._history.bytes <= 20_000
        assert 0 <= step.drafts._room <= 500
        if number % 16 == 15:
            step.requests.clear()
            step.sample()
            assert not step.drafts._followed and not step.drafts._prompts and step.drafts._room == 500


def test_a_full_index_drafts_from_what_it_has() -> None:
    for indexed, drafts in ((2, []), (3, [6, 7, 1, 5])):
        step = Step(indexed_tokens=indexed)
        step.start("a", [5, 6, 7, 1])
        assert step.sample(a=[5]) == {"a": drafts}


def test_what_was_sampled_while_no_draft_was_asked_for_is_caught_up() -> None:
    step = Step()
    step.start("a", [1])
    step.sample(a=[5])
    step.requests["a"].output_token_ids += [6, 7]
    assert step.sample(a=[5]) == {"a": [6, 7, 5]}


def test_a_history_keeps_the_newest_of_a_prompt() -> None:
    history = History()
    for number in range(COMPLETIONS_OF_A_PROMPT + 3):
        history.remember([1], [number])
    kept = [completion[0] for completion in history.of([1])]
    assert kept == list(range(3, COMPLETIONS_OF_A_PROMPT + 3))
    assert list(history.of([1, 1])) == []


@pytest.mark.parametrize("most", [0, 500, 3000, 20_000])
def test_a_history_stays_within_its_bytes_and_drops_the_oldest_prompts(most: int) -> None:
    history = History(most)
    for round_ in range(3):
        for prompt in range(40):
            history.remember([prompt], [round_] * 20)
            assert history.bytes <= most
    kept = [prompt for prompt in range(40) if list(history.of([prompt]))]
    assert kept == list(range(40 - len(kept), 40))
    assert (len(kept) > 0) == (most >= 500)
    sizes = sum(4 * len(completion) for prompt in kept for completion in history.of([prompt]))
    assert sizes < history.bytes or not kept


def test_a_token_without_a_step_of_its_own_was_an_accepted_draft() -> None:
    counts = DraftCounts(tokens=10, steps=6, drafted=9) + DraftCounts(tokens=2, steps=2)
    assert counts == DraftCounts(12, 8, 9) and counts.accepted == 4

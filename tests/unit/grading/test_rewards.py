"""Reward functions are called as ms-swift calls them, a faulty one is named, and no advantage is NaN."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.grading.rewards import RewardError, RewardFunctions, call_reward_functions
from swift_megatron_grpo.settings.algorithm import ScaleRewards
from swift_megatron_grpo.types import Prompt, Rollout
from tests.support.grading import group_advantages, total_reward

SCALES: list[ScaleRewards] = ["group", "batch", "none"]


def make_rollouts(texts: Sequence[str], group: int = 1, **columns: Any) -> list[Rollout]:
    """Return groups of `group` completions; `columns` are constant columns of the dataset."""
    rollouts = []
    for i, text in enumerate(texts):
        row = {"messages": [{"role": "user", "content": f"question {i // group}"}], **columns}
        rollouts.append(
            Rollout(
                prompt=Prompt(prompt_id=f"0-{i // group}", row=row),
                prompt_ids=[1, 2, 3],
                completion_ids=list(range(len(text))),
                logprobs=None,
                text=text,
                finish_reason="length" if text.endswith("...") else "stop",
                weights_version=0,
            )
        )
    return rollouts


def functions(*called: Callable[..., Any]) -> RewardFunctions:
    return RewardFunctions([function.__name__ for function in called], called)


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


# ---- arguments of reward functions


class Recorder:
    """A reward function that records its arguments."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        self.completions, self.kwargs = completions, kwargs
        return [0.0] * len(completions)


def only(recorder: Recorder) -> RewardFunctions:
    return RewardFunctions(["recorder"], [recorder])


def test_a_function_receives_the_same_arguments_as_from_ms_swift() -> None:
    from swift.rl_core.data import GRPOSample
    from swift.rl_core.grpo_algorithm import compute_rewards_per_func

    rows = [
        {
            "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "of the dataset"}],
            "solution": "2",
            "images": [],
            "tools": None,
            "objects": {"ref": ["x"]},
            "dataset": "a.jsonl",
        },
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2"}], "answer": {"value": 4}},
    ]
    rollouts = [
        Rollout(Prompt(f"0-{i}", row), [1], [5, 6, 7 + i], None, f"text {i}", reason, 0)
        for i, (row, reason) in enumerate(zip(rows, ["stop", "length"], strict=True))
    ]
    samples = []
    for rollout in rollouts:
        sample = GRPOSample.from_row(rollout.prompt.row)
        if sample.messages[-1]["role"] == "assistant":
            sample.messages.pop()
        sample.messages.append({"role": "assistant", "content": rollout.text})
        sample.response_token_ids = rollout.completion_ids  # type: ignore[assignment]  # the form in which colocated vLLM returns them
        sample.finish_reason = rollout.finish_reason
        sample.prompt_id, sample.request_id = rollout.prompt.prompt_id, f"{rollout.prompt.prompt_id}-0"
        samples.append(sample)
    state = object()

    expected, actual = Recorder(), Recorder()
    compute_rewards_per_func(samples, [expected], [None], torch.device("cpu"), trainer_state=state)
    call_reward_functions(rollouts, only(actual), state)

    assert actual.completions == expected.completions
    assert actual.kwargs == expected.kwargs
    assert actual.kwargs["trainer_state"] is state
    assert actual.kwargs["messages"][0][-1] == {"role": "assistant", "content": "text 0"}


def test_reward_functions_of_ms_swift_can_be_called() -> None:
    from types import SimpleNamespace

    from swift.rewards import orms

    limits = SimpleNamespace(soft_max_length=8, soft_cache_length=4, repetition_n_grams=2, repetition_max_penalty=-1.0)
    names = ["format", "soft_overlong", "repetition"]
    rewards = RewardFunctions(names, [orms[name](args=limits) for name in names])
    rollouts = make_rollouts(["<think>a</think><answer>b</answer>", "a b a b a b"])
    assert call_reward_functions(rollouts, rewards, None) == [
        [1.0, pytest.approx(-7.5), 0.0],
        [0.0, pytest.approx(-1.75), -0.6],
    ]


def test_a_function_that_modifies_its_arguments_leaves_the_dataset_alone() -> None:
    def careless(completions: list[str], messages: list[Any], solution: list[Any], **kwargs: Any) -> list[float]:
        for turn in messages:
            turn.clear()
        solution[0]["value"] = "spoilt"
        return [0.0] * len(completions)

    solution = {"value": "4"}
    rollouts = make_rollouts(["a", "b"], group=2, solution=solution)
    call_reward_functions(rollouts, functions(careless), None)
    assert solution == {"value": "4"}
    assert rollouts[0].prompt.row["messages"] == [{"role": "user", "content": "question 0"}]


def test_request_ids_distinguish_the_completions_of_a_prompt() -> None:
    recorder = Recorder()
    call_reward_functions(make_rollouts(["a", "b", "c", "d"], group=2), only(recorder), None)
    assert recorder.kwargs["request_id"] == ["0-0-0", "0-0-1", "0-1-0", "0-1-1"]
    assert recorder.kwargs["prompt_id"] == ["0-0", "0-0", "0-1", "0-1"]


# ---- return values


def test_none_means_that_a_function_does_not_apply() -> None:
    def only_a(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0 if completion == "a" else None for completion in completions]

    assert call_reward_functions(make_rollouts(["a", "b"]), functions(only_a, length), None) == [
        [1.0, 1.0],
        [None, 1.0],
    ]


@pytest.mark.parametrize(
    "returned", [[1, 2.5], (True, numpy.float32(2.5)), numpy.array([1, 2.5]), torch.tensor([1, 2.5])]
)
def test_any_sequence_of_numbers_is_accepted(returned: Any) -> None:
    def numbers(completions: list[str], **kwargs: Any) -> Any:
        return returned

    assert call_reward_functions(make_rollouts(["a", "b"]), functions(numbers), None) == [[1.0], [2.5]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "reward function strange returned 1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], "reward function strange returned 3 rewards for 2 completions"),
        (1.0, "reward function strange returned float, not a list of 2 numbers"),
        (None, "reward function strange returned NoneType, not a list of 2 numbers"),
        (
            [1.0, "2"],
            "reward function strange returned '2' (str), neither a number nor None (prompt 0-1, completion 'b'",
        ),
        ([1.0, [2.0]], "reward function strange returned [2.0] (list), neither a number nor None (prompt 0-1"),
        ([torch.ones(2), 1.0], "neither a number nor None (prompt 0-0, completion 'a')"),
        ([[10**5000], 1.0], "returned a value without a text (ValueError) (list), neither a number"),
        ([1.0, b"x" * 10**7], "xxx ... (bytes), neither a number nor None (prompt 0-1"),
    ],
)
def test_a_return_value_that_is_not_a_list_of_numbers_is_reported(returned: Any, message: str) -> None:
    def strange(completions: list[str], **kwargs: Any) -> Any:
        return returned

    with pytest.raises(RewardError) as caught:
        call_reward_functions(make_rollouts(["a", "b"]), functions(strange), None)
    assert message in str(caught.value) and len(str(caught.value)) < 3000


def test_a_number_beyond_every_float_is_infinite() -> None:
    def huge(completions: list[str], **kwargs: Any) -> list[int]:
        return [10**400, -(10**5000)]

    assert call_reward_functions(make_rollouts(["a", "b"]), functions(huge), None) == [[math.inf], [-math.inf]]


# ---- exceptions


class Unprintable(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class Hostile:
    """A number whose code runs when the trainer reads it."""

    def __float__(self) -> float:
        raise SystemExit(5)


def fails_in_its_result(completions: list[str]) -> Iterator[float]:
    yield 1.0
    raise KeyError("solution")


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("function_is_async", [False, True])
@pytest.mark.parametrize(
    ("make_result", "message"),
    [
        (lambda texts: throw(Unprintable()), "raised Unprintable: a value without a text (SystemExit)"),
        (lambda texts: throw(ValueError("x" * 10**7)), "raised ValueError: xxx"),
        (lambda texts: [Hostile(), 1.0], "raised SystemExit: 5"),
        (fails_in_its_result, "raised KeyError: 'solution'"),
    ],
)
def test_no_code_of_a_reward_function_escapes_its_name(
    make_result: Callable[[list[str]], Any],
    message: str,
    function_is_async: bool,
    drop: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def hostile(completions: list[str], **kwargs: Any) -> Any:
        return make_result(completions)

    async def hostile_later(completions: list[str], **kwargs: Any) -> Any:
        return make_result(completions)

    called = functions(hostile_later if function_is_async else hostile)
    if drop:
        scores = call_reward_functions(make_rollouts(["a", "b"]), called, None, drop_failing=True)
        assert all(math.isnan(score or 0.0) for [score] in scores)
        shown = caplog.text
    else:
        with pytest.raises(RewardError) as caught:
            call_reward_functions(make_rollouts(["a", "b"]), called, None)
        shown = str(caught.value)
    assert f"reward function {called.names[0]} {message}" in shown and len(shown) < 3000


def throw(error: Exception) -> NoReturn:
    raise error


def raises_on_bad(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(completion) for completion in completions]


async def raises_on_bad_later(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(completion) for completion in completions]


@pytest.mark.parametrize("function", [raises_on_bad, raises_on_bad_later])
def test_an_error_names_the_function_the_batch_and_its_first_completion(function: Callable[..., Any]) -> None:
    texts = ["seven " + "x" * 300, *(str(i) for i in range(12))]
    with pytest.raises(RewardError) as caught:
        call_reward_functions(make_rollouts(texts), functions(length, function), None)
    message = str(caught.value)
    assert message.startswith(f"reward function {function.__name__} raised ValueError: could not convert string")
    assert "(on 13 completions, the first: prompt 0-0, completion 'seven " in message
    shown = message.rsplit("completion '", 1)[1]
    assert shown.startswith(("seven " + "x" * 300)[:200] + " ...")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_function_that_raises_is_not_called_again() -> None:
    """It may cost money, or keep state."""
    calls = []

    def raises(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        raise ValueError("once")

    with pytest.raises(RewardError, match="once"):
        call_reward_functions(make_rollouts(list("abcd")), functions(raises), None)
    assert calls == [4]


@pytest.mark.parametrize("function_is_async", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_exception_that_would_end_the_rank_is_a_failure_of_the_function(
    error: BaseException, function_is_async: bool
) -> None:
    def leaves(completions: list[str], **kwargs: Any) -> list[float]:
        if "bad" in completions:
            raise error
        return [1.0] * len(completions)

    async def leaves_later(completions: list[str], **kwargs: Any) -> list[float]:
        return leaves(completions)

    function = leaves_later if function_is_async else leaves
    with pytest.raises(RewardError) as caught:
        call_reward_functions(make_rollouts(["a", "bad", "c"]), functions(length, function), None)
    assert f"reward function {function.__name__} raised {type(error).__name__}" in str(caught.value)
    assert "(on 3 completions, the first: prompt 0-0, completion 'a')" in str(caught.value)


@pytest.mark.parametrize("drop", [False, True])
def test_a_task_that_would_end_the_rank_is_a_failure_of_its_function(drop: bool) -> None:
    async def one(text: str) -> float:
        sys.exit(0)

    async def in_tasks(completions: list[str], **kwargs: Any) -> list[float]:
        return await asyncio.gather(*map(one, completions))

    rollouts, called = make_rollouts(["a", "b"]), functions(length, in_tasks)
    if drop:
        scores = call_reward_functions(rollouts, called, None, drop_failing=True)
        assert [row[0] for row in scores] == [1.0, 1.0] and all(math.isnan(row[1] or 0.0) for row in scores)
    else:
        with pytest.raises(RewardError, match="reward function in_tasks raised SystemExit"):
            call_reward_functions(rollouts, called, None)


@pytest.mark.parametrize("function_is_async", [False, True])
@pytest.mark.parametrize(("leave", "code"), [("returns", 1), ("raises", 1), ("exits", 7)])
def test_a_forked_child_does_not_leave_the_function(
    capfd: pytest.CaptureFixture[str], function_is_async: bool, leave: str, code: int
) -> None:
    """A child that left the function would continue as a second copy of its rank."""

    def forks(completions: list[str], **kwargs: Any) -> list[float]:
        child = os.fork()
        if child == 0:
            if leave == "raises":
                raise ValueError("in the child")
            if leave == "exits":
                sys.exit(code)
            return []
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        return [1.0] * len(completions)

    async def forks_later(completions: list[str], **kwargs: Any) -> list[float]:
        return forks(completions)

    function, pid = forks_later if function_is_async else forks, os.getpid()
    scores = call_reward_functions(make_rollouts(["a", "b"]), functions(function), None)
    assert os.getpid() == pid  # else pytest itself runs twice
    assert scores == [[1.0], [1.0]]
    message = f"reward function {function.__name__} forked a process that left the function"
    assert (message in capfd.readouterr().err) == (leave != "exits")


@pytest.mark.parametrize("function_is_async", [False, True])
def test_a_missing_dataset_column_is_a_reward_error(function_is_async: bool) -> None:
    def needs_solution(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    async def needs_solution_later(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    function = needs_solution_later if function_is_async else needs_solution
    with pytest.raises(RewardError, match="missing 1 required positional argument: 'solution'"):
        call_reward_functions(make_rollouts(["a", "b"]), functions(function), None)


def test_coroutines_run_concurrently_and_results_keep_their_order() -> None:
    met = asyncio.Barrier(2)

    async def first(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.wait_for(met.wait(), 5)
        return [1.0] * len(completions)

    class Second:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            await asyncio.wait_for(met.wait(), 5)
            return [2.0] * len(completions)

    rewards = RewardFunctions(["first", "length", "second"], [first, length, Second()])
    assert call_reward_functions(make_rollouts(["a", "bb"]), rewards, None) == [[1.0, 1.0, 2.0], [1.0, 2.0, 2.0]]


def test_nothing_to_score_asks_nobody() -> None:
    assert call_reward_functions([], functions(raises_on_bad), None) == []


# ---- from rewards to advantages

reward = st.floats(-100, 100).map(lambda value: round(value, 3))
groups_of_4 = st.lists(st.lists(reward, min_size=4, max_size=4), min_size=1, max_size=6)


@pytest.mark.parametrize("scale", SCALES)
@given(value=st.floats(-1e30, 1e30))
def test_equal_rewards_have_advantages_of_exactly_zero(scale: ScaleRewards, value: float) -> None:
    assert group_advantages([value] * 7 + [0.0] * 7, 7, scale)[:7] == [0.0] * 7


@pytest.mark.parametrize("scale", SCALES)
@given(groups=groups_of_4, dropped=st.sets(st.integers(0, 23)))
def test_dropped_rewards_do_not_affect_the_others(
    scale: ScaleRewards, groups: list[list[float]], dropped: set[int]
) -> None:
    rewards: list[float | None] = [value for group in groups for value in group]
    rewards = [None if i in dropped else value for i, value in enumerate(rewards)]
    advantages = group_advantages(rewards, 4, scale)
    spread = torch.tensor([value for value in rewards if value is not None], dtype=torch.float64).std().item()
    for start in range(0, len(rewards), 4):
        kept = [i for i in range(start, start + 4) if rewards[i] is not None]
        values = torch.tensor([rewards[i] for i in kept], dtype=torch.float64)
        divisor = {"group": values.std().item() + 1e-4, "batch": spread + 1e-4, "none": 1.0}[scale]
        for i in range(start, start + 4):
            if i not in kept or len(kept) < 2:
                assert advantages[i] == 0.0
            else:
                expected = (values[kept.index(i)] - values.mean()).item() / divisor
                assert advantages[i] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_total_reward_is_the_weighted_sum_over_applicable_functions() -> None:
    assert total_reward([1.0, None, 3.0], [1.0, 5.0, 0.5]) == 2.5
    assert total_reward([None, None], [1.0, 1.0]) is None
    assert total_reward([1.0, math.nan], [1.0, 1.0]) is None
    assert total_reward([1.0, -math.inf], [1.0, 0.0]) is None
    assert total_reward([3e38, 3e38], [1.0, 1.0]) is None  # infinite in fp32


def test_an_incomplete_group_is_refused() -> None:
    with pytest.raises(ValueError, match="7 rewards cannot be split into groups of 4"):
        group_advantages([0.0] * 7, 4, "group")


@pytest.mark.parametrize("value", [{0: 1.0, 1: 0.5}, {5.0, 7.0}, b"\x00\x01"])
def test_rewards_are_in_an_order(value: Any) -> None:
    def unordered(completions: list[str], **kwargs: Any) -> Any:
        return value

    with pytest.raises(RewardError, match=f"returned {type(value).__name__}, not a list of 2 numbers"):
        call_reward_functions(make_rollouts(["a", "b"]), functions(unordered), None)

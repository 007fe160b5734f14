"""With --bad_reward drop, completions on which a reward function raises get NaN, and the others keep their rewards."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from swift_megatron_grpo.grading import RewardFunctions, call_reward_functions, rewards
from tests.unit.grading.test_rewards import functions, length, make_rollouts


@pytest.mark.parametrize("bad", [[], [0], [6], [1, 2, 5], list(range(7))])
@pytest.mark.parametrize("error", [KeyError("solution"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("is_async", [False, True])
def test_failing_completions_get_nan_and_the_others_keep_their_rewards(
    bad: list[int], error: BaseException, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"text {i}" for i in range(7)]

    def raises(completions: list[str], **kwargs: Any) -> list[float]:
        if any(texts[i] in completions for i in bad):
            raise error
        return length(completions)

    async def raises_later(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return raises(completions)

    called = RewardFunctions(["raises", "length"], [raises_later if is_async else raises, length], [1.0, 1.0])
    scores = call_reward_functions(make_rollouts(texts), called, None, drop_failing=True)
    assert [i for i, (first, _) in enumerate(scores) if math.isnan(first or 0.0)] == bad
    assert [second for _, second in scores] == length(texts)
    named = f"reward function raises raised {type(error).__name__}: {error}; --bad_reward drop leaves {len(bad)} of 7"
    assert (named in caplog.text) == bool(bad)


def test_the_search_for_failing_completions_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes longer than the search may take, so only the first half is tried."""
    monkeypatch.setattr(rewards, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(rewards.time, "monotonic", iter(range(10**6)).__next__)
    calls: list[int] = []

    def raises(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        raise KeyError("solution")

    scores = call_reward_functions(make_rollouts(["a"] * 64), functions(raises), None, drop_failing=True)
    assert all(math.isnan(score or 0.0) for [score] in scores) and len(calls) < 10

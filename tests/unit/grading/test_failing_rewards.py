"""With --bad_reward drop, a function that raises leaves its batch out; it is not called again on parts of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from swift_megatron_grpo.grading.rewards import RewardFunctions, call_reward_functions
from tests.unit.grading.test_rewards import length, make_rollouts


@pytest.mark.parametrize("error", [KeyError("solution"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_on_which_a_function_raises_gets_nan_from_it_alone(
    error: BaseException, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"text {i}" for i in range(7)]
    calls = []

    def raises(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(completions)
        raise error

    async def raises_later(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return raises(completions)

    called = RewardFunctions(["raises", "length"], [raises_later if is_async else raises, length])
    scores = call_reward_functions(make_rollouts(texts), called, None, drop_failing=True)
    assert calls == [texts]
    assert all(math.isnan(first or 0.0) for first, _ in scores)
    assert [second for _, second in scores] == length(texts)
    named = f"reward function raises raised {type(error).__name__}: {error}; --bad_reward drop leaves its batch out"
    assert f"{named} (on 7 completions, the first: prompt 0-0, completion 'text 0')" in caplog.text

"""Names and behaviour of ms-swift's multi-turn code that conversations/, generation/local/ and server/ rely on."""

from __future__ import annotations

import inspect
from dataclasses import fields

from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest, RolloutOutput
from swift.rl_core.data import OnPolicySample
from swift.rollout import MultiTurnScheduler, envs, multi_turns
from swift.rollout.multi_turn import GYMScheduler, OpenEnvScheduler


def test_schedulers_and_environments_have_these_hooks() -> None:
    for name in ("on_trajectory_start", "on_turn_end", "run", "step", "check_finished"):
        assert callable(getattr(MultiTurnScheduler, name))
    assert inspect.iscoroutinefunction(MultiTurnScheduler.on_turn_end)
    assert {"max_turns", "infer_engine"} <= set(inspect.signature(MultiTurnScheduler.__init__).parameters)
    assert "gym_scheduler" in multi_turns and "math_env" in envs
    of_swift = {name: each for name, each in multi_turns.items() if each.__module__.startswith("swift.")}
    overriding = {name for name, scheduler in of_swift.items() if scheduler.run is not MultiTurnScheduler.run}
    assert overriding == {"thinking_tips_scheduler"}


def test_the_schedulers_run_calls_its_hooks_and_the_engine_in_every_turn() -> None:
    """Conversations run with it; conversations/running.py ends those that have no tokens left in a hook."""
    assert list(inspect.signature(MultiTurnScheduler.run).parameters)[:3] == ["self", "infer_request", "request_config"]
    source = inspect.getsource(MultiTurnScheduler.run)
    for expected in (
        "await self.on_trajectory_start([current_request])",
        "await self.infer_engine.infer_async(",
        "await self.on_turn_end(current_request, response_choice, current_turn)",
        "if 'done' in turn_result:",
    ):
        assert expected in source


def test_run_still_omits_the_token_prefix() -> None:
    """generation/conversations/running.py adds it; once `run` does, that code can be removed."""
    assert "ret.setdefault('response_token_ids', response_ids)" in inspect.getsource(MultiTurnScheduler.run)
    assert list(inspect.signature(MultiTurnScheduler.get_response_token_data).parameters) == [
        "self", "infer_request", "response_choice", "is_continuation", "response_token_ids", "response_loss_mask",
    ]  # fmt: skip
    assert list(inspect.signature(MultiTurnScheduler.append_assistant_completion).parameters)[1:] == [
        "infer_request", "completion",
    ]  # fmt: skip


def test_environments_are_closed_by_the_uuid_of_their_conversation() -> None:
    assert list(inspect.signature(GYMScheduler._close_and_remove).parameters) == ["self", "uuid"]
    assert inspect.iscoroutinefunction(GYMScheduler._close_and_remove)
    assert inspect.iscoroutinefunction(OpenEnvScheduler._close_and_remove)


def test_requests_and_outputs_have_these_fields() -> None:
    assert "include_extra" in inspect.signature(OnPolicySample.to_infer_request).parameters
    assert {"uuid", "data_dict", "messages"} <= {field.name for field in fields(RolloutInferRequest)}
    assert {"index", "message", "finish_reason", "logprobs", "token_ids"} <= {
        field.name for field in fields(ChatCompletionResponseChoice)
    }
    required = {"response", "messages", "response_token_ids", "response_loss_mask", "rollout_infos"}
    assert required <= set(RolloutOutput.model_fields)

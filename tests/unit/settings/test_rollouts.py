"""Combinations of flags of recording, asynchronous generation, time limits and traces."""

from __future__ import annotations

from typing import Any

import pytest

from swift_megatron_grpo.settings.asynchronous import Asynchronous
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.time_limits import TimeLimits, Trace
from tests.unit.settings.flags import faults, of


@pytest.mark.parametrize(
    ("dump", "replay", "only", "advice"),
    [
        ("dump", None, True, ""),
        (None, "dump", False, ""),
        ("a", "b", False, "leave one of them out"),
        (None, "b", True, "leave one of them out"),
        (None, None, True, "add --rollout_dump"),
    ],
)
def test_recording_flags_that_exclude_each_other(dump: Any, replay: Any, only: bool, advice: str) -> None:
    message = faults(Recording, rollout_dump=dump, rollout_replay=replay, rollout_only=only)
    assert advice in message and bool(message) == bool(advice)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({}, ""),
        ({"max_staleness": 0}, ""),
        ({"max_staleness": 3}, ""),
        ({"async_generate": False, "vllm_mode": "colocate", "rollout_replay": "folder"}, ""),
        ({"async_generate": False, "max_staleness": 2}, "--async_generate true; add that flag, or leave"),
        ({"max_staleness": -1}, "use --max_staleness 1"),
        ({"in_flight_weight_updates": True}, ""),
        ({"in_flight_weight_updates": True, "async_generate": False}, "add --async_generate true, or leave it out"),
        ({"in_flight_weight_updates": True, "seed_completions": True}, "use --seed_completions false (--rollout_dump"),
        ({"in_flight_weight_updates": True, "seed_completions": True, "max_staleness": 0}, ""),
        ({"in_flight_weight_updates": True, "vllm_enable_lora": True}, "use --vllm_enable_lora false"),
        ({"vllm_mode": "colocate"}, "use --vllm_mode server with `swift rollout` on separate GPUs"),
        ({"rollout_replay": "folder"}, "--rollout_replay does not generate; leave one of them out"),
        ({"rollout_only": True, "vllm_mode": "colocate"}, "--rollout_only true does not train; leave one of them out"),
    ],
)
def test_flags_that_exclude_asynchronous_generation(typed: dict[str, Any], message: str) -> None:
    found = faults(Asynchronous, **{"async_generate": True, "vllm_mode": "server"} | typed)
    assert message in found and bool(found) == bool(message)


def test_sampling_flags_that_distort_log_probs_of_older_weights_are_noted() -> None:
    def notes(**typed: Any) -> list[str]:
        return of(Asynchronous, **{"async_generate": True} | typed).notes()

    assert notes() == [] == notes(max_staleness=0, top_p=0.9)
    [note] = notes(top_p=0.9, top_k=50, min_p=0.1)
    assert "with --top_p 0.9 and --top_k 50 and --min_p 0.1" in note
    assert note.endswith("use --top_p 1 --top_k -1 --min_p 0")
    assert note.startswith("--async_generate true: ")
    [note] = notes(async_generate=False, old_logprobs="engine", top_p=0.9)
    assert note.startswith("--old_logprobs engine: ") and note.endswith("use --top_p 1")
    assert notes(async_generate=False, old_logprobs="engine") == [] == notes(async_generate=False, top_p=0.9)


@pytest.mark.parametrize(
    ("reward", "phase", "grace", "advice"),
    [
        (None, 0, 120, ""),
        (60, 3600, 120, ""),
        (60, 0, 120, ""),
        (-1.0, 60.0, 9.0, "or leave it out"),
        (60.0, 60.0, 9.0, "use --phase_timeout 120"),
        (None, -1.0, 9.0, "use --phase_timeout 0"),
        (None, 0.0, 0.0, "--stop_grace 120"),
    ],
)
def test_time_limits_must_be_positive_and_nested(reward: Any, phase: float, grace: float, advice: str) -> None:
    found = faults(TimeLimits, reward_timeout=reward, phase_timeout=phase, stop_grace=grace)
    assert advice in found and bool(found) == bool(advice)


def test_a_step_or_a_range_is_traced() -> None:
    assert of(Trace).steps is None
    assert of(Trace, trace_steps="3").steps == (3, 3) and of(Trace, trace_steps=" 3-5 ").steps == (3, 5)
    assert faults(Trace, trace_steps=" 3-5 ", train_iters=4) == ""


@pytest.mark.parametrize(
    ("text", "advice"),
    [("0-2", "use --trace_steps 3-5"), ("5-3", "use --trace_steps 3-5"), ("a", "use --trace_steps 3-5"),
     ("1-1000", "use --trace_steps 1-100"), ("20-30", "use --trace_steps 9")],
)  # fmt: skip
def test_steps_that_cannot_be_traced_are_refused(text: str, advice: str) -> None:
    assert advice in faults(Trace, trace_steps=text, train_iters=10)


def test_a_run_that_only_generates_has_no_steps_to_trace() -> None:
    assert "leave --trace_steps out" in faults(Trace, trace_steps="1", train_iters=10, rollout_only=True)

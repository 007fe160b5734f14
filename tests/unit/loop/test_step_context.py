"""Time and memory of phases."""

from __future__ import annotations

from swift_megatron_grpo.loop.step_context import PhaseTimer


def test_a_phase_has_the_sum_of_its_times_and_the_most_of_its_memory() -> None:
    used = iter([3.0, 7.0, 5.0])
    timer = PhaseTimer(used_memory=lambda: next(used))
    for phase in ("train", "generation", "train"):
        with timer(phase):
            pass
    assert timer.memory() == {"memory/train": 5.0, "memory/generation": 7.0}
    assert set(timer.seconds()) == {"time/train", "time/generation"}


def test_without_a_gpu_there_is_no_memory() -> None:
    timer = PhaseTimer()
    with timer("train"):
        pass
    assert timer.memory() == {}

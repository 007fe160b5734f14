"""The guessed time of a pipeline is that of its schedule, simulated micro batch by micro batch."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.cli.estimate.activations import Decoder
from swift_megatron_grpo.cli.estimate.throughput import PassCounts, StepWork, seconds_of_training
from swift_megatron_grpo.runtime.gpus import find_gpu
from swift_megatron_grpo.settings.layout import Layout

DECODER = Decoder(8, 64, 64, 64, 128, 256, False)


def simulated(stages: list[float], micro_batches: int) -> float:
    """Return when the last micro batch has left the last stage, if stage s takes stages[s] for each."""
    free = [0.0] * len(stages)
    for _ in range(micro_batches):
        arrival = 0.0
        for place, seconds in enumerate(stages):
            arrival = free[place] = max(free[place], arrival) + seconds
    return free[-1]


@pytest.mark.parametrize("micro_batches", [1, 4, 32])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_even_stages_take_as_long_as_the_simulated_schedule(stages: int, micro_batches: int) -> None:
    work = StepWork(1e15, 0.0, 8192, 4096)
    layout = Layout(stages, pipeline_model_parallel_size=stages)
    seconds = [
        seconds_of_training(work, find_gpu("H200-141G"), DECODER, one, micro_batches, PassCounts(), item=2)
        for one in (layout, Layout(stages))
    ]
    schedule = simulated([1.0] * stages, micro_batches) / micro_batches
    assert seconds[0] / seconds[1] == pytest.approx(schedule)


def test_many_micro_batches_take_as_long_as_the_fullest_stage() -> None:
    """The output layer takes as much as two of the eight layers."""
    layout, work = Layout(4, pipeline_model_parallel_size=4), StepWork(1e15, 2e14, 8192, 4096)
    seconds = [
        seconds_of_training(work, find_gpu("H200-141G"), DECODER, one, 1000, PassCounts(), item=2)
        for one in (layout, Layout(4))
    ]
    schedule = simulated([2.0, 2.0, 2.0, 4.0], 1000) / 1000 / (10 / 4)
    assert seconds[0] / seconds[1] == pytest.approx(schedule, rel=0.01)

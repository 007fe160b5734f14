"""Random numbers that an evaluation draws do not change those of training."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swift_megatron_grpo.loop.random_numbers import same_random_numbers_afterwards


def draw() -> list[float]:
    gpu = torch.rand(1, device=torch.cuda.current_device())
    return [random.random(), float(np.random.rand()), float(torch.rand(1)), float(gpu)]


def test_every_default_generator_goes_on_where_it_was() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw(), draw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draw()
    with pytest.raises(ZeroDivisionError), same_random_numbers_afterwards():
        draw()
        raise ZeroDivisionError
    assert [first, draw()] == expected

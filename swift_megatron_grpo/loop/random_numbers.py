"""Random numbers of training, unchanged by what an evaluation draws.

vLLM in the training processes draws from torch's default generators, on a CPU even for completions that have seeds of
their own, and reward functions may draw from any.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def same_random_numbers_afterwards() -> Iterator[None]:
    """Restore the states of the default generators of this process and its GPU, also after an error."""
    python, arrays = random.getstate(), np.random.get_state()
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state(gpu)

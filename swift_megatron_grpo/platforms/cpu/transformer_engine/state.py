"""State next to the layers: random states by name (te_rng_tracker of megatron-core), and fp8, which is always off."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported


class CudaRNGStatesTracker:
    """Named random states. fork(name) continues one of them and restores the current state afterwards."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"seed {seed} or cuda rng state {name} already exists")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


class Format(enum.Enum):
    E4M3 = "E4M3"
    HYBRID = "HYBRID"


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False


@contextmanager
def fp8_autocast(enabled: bool = True, **settings: object) -> Iterator[None]:
    """Do nothing with fp8 off, where its settings have no effect."""
    reject_unsupported("fp8_autocast", enabled=enabled)
    yield


@contextmanager
def fp8_model_init(enabled: bool = True, **settings: object) -> Iterator[None]:
    reject_unsupported("fp8_model_init", enabled=enabled)
    yield

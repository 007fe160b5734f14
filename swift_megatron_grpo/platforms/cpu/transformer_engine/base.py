"""Base class of the stand-in's layers: parameters with deferred initialisation, and fp8 attributes, all off."""

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported

Device = torch.device | str | int | None
Initializer = Callable[[torch.Tensor], Any]


def mappings() -> Any:
    """Return Megatron's collectives with gradients. Megatron imports this stand-in, so they are imported when used."""
    return import_module("megatron.core.tensor_parallel.mappings")


def constant(value: float) -> Initializer:
    return lambda tensor: nn.init.constant_(tensor, value)


def default_weight_init(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, mean=0.0, std=0.023)  # Transformer Engine's default


class TransformerEngineBaseModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.tp_group: dist.ProcessGroup | None = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.get_rng_state_tracker: Callable[[], Any] | None = None
        self.rng_tracker_name: str | None = None
        self._initializers: dict[str, tuple[Initializer, bool]] = {}

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        self.tp_group = tp_group

    def _set_tensor_parallelism(self, tp_group: dist.ProcessGroup | None, tp_size: int) -> None:
        """Set group and size. Without a group yet, `tp_size` splits the weights; it is set before the first forward."""
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()

    def _new_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        init: Initializer,
        device: Device = None,
        dtype: torch.dtype | None = None,
        tracked: bool = False,
    ) -> None:
        """Register a parameter. reset_parameters() calls `init`, under the module's RNG tracker if `tracked`."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._initializers[name] = (init, tracked)

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise every parameter, after allocating those on the meta device."""
        if defer_init:
            return
        for name, (init, tracked) in self._initializers.items():
            parameter = getattr(self, name)
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                setattr(self, name, parameter)
            with self._fork_rng() if tracked else nullcontext():
                init(parameter)

    def _fork_rng(self) -> AbstractContextManager[Any]:
        if self.get_rng_state_tracker is None:
            return nullcontext()
        tracker = self.get_rng_state_tracker()
        names = (self.rng_tracker_name,) if self.rng_tracker_name else ()
        fork: AbstractContextManager[Any] = tracker.fork(*names)
        return fork

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: Megatron calls this when it loads a checkpoint, but without fp8 there is nothing to prepare."""

    def get_extra_state(self) -> torch.Tensor:
        """Return Transformer Engine's state without fp8, so that checkpoints have the same keys on both platforms."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is not None and state.numel() > 0:
            reject_unsupported(f"{type(self).__name__}.set_extra_state", fp8_state=True)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed (delay_wgrad_compute is rejected)."""


# ---- state next to the layers: random states by name (te_rng_tracker of megatron-core), and fp8, which is always off


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

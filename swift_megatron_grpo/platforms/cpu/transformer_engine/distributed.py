"""Activation recompute and the tracker of random states, for te_checkpoint and te_rng_tracker of megatron-core.

On this platform the CUDA generator is the CPU generator, so that there is only one state to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.utils.checkpoint import detach_variable, noop_context_fn

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported

_latest_tracker_states: dict[str, torch.Tensor] = {}


class CudaRNGStatesTracker:
    """Named random states. fork(name) continues one of them and restores the current state afterwards."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        global _latest_tracker_states
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()
        _latest_tracker_states = self.states_

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


def get_all_rng_states() -> dict[str, torch.Tensor]:
    return _latest_tracker_states


class activation_recompute_forward(AbstractContextManager[None], ContextDecorator):
    """A context that does nothing: upstream it notifies fp8 layers of recomputation."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    use_reentrant: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Call function(*args, **kwargs), and call it again in backward with the same random states."""
    reject_unsupported(
        "checkpoint",
        distribute_saved_activations=distribute_saved_activations,
        non_reentrant=not use_reentrant,
        context_fn=context_fn is not noop_context_fn,
        debug=debug,
    )
    return _Recompute.apply(function, get_rng_state_tracker, kwargs, *args)


class _RandomStates:
    """A snapshot of the generator and the tracker."""

    def __init__(self, get_tracker: Callable[[], Any] | None) -> None:
        self._get_tracker = get_tracker
        self._generator = torch.get_rng_state()
        self._tracked = None if get_tracker is None else get_tracker().get_states()

    def restore(self) -> None:
        torch.set_rng_state(self._generator)
        if self._get_tracker is not None:
            self._get_tracker().set_states(self._tracked)


class _Recompute(Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        get_tracker: Callable[[], Any] | None,
        kwargs: dict[str, Any],
        *args: Any,
    ) -> Any:
        ctx.function, ctx.get_tracker, ctx.kwargs = function, get_tracker, kwargs
        ctx.states = _RandomStates(get_tracker)
        with torch.no_grad():
            outputs = function(*args, **kwargs)
        ctx.others = [None if torch.is_tensor(arg) else arg for arg in args]
        ctx.save_for_backward(*(arg if torch.is_tensor(arg) else None for arg in args))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("checkpoint() works with .backward(), not with .grad()")
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        inputs = detach_variable(tuple(other if tensor is None else tensor for tensor, other in saved))
        current = _RandomStates(ctx.get_tracker)
        ctx.states.restore()
        with torch.enable_grad():
            outputs = ctx.function(*inputs, **ctx.kwargs)
        current.restore()
        outputs = (outputs,) if torch.is_tensor(outputs) else outputs
        pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if torch.is_tensor(y) and y.requires_grad]
        if not pairs:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
        return None, None, None, *(x.grad if torch.is_tensor(x) else None for x in inputs)

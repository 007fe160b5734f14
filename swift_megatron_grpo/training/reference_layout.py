"""A second parallel layout of the same ranks, for a model that needs less parallelism than the trained one.

Megatron keeps its process groups in global variables of one module; layers read them when they are built or when they
run. A second set of groups is therefore created once, and swapped in while the second model is built or runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_bridge.bridge import gpt_bridge
from megatron.core import parallel_state

from swift_megatron_grpo.settings.layout import Layout

# Independent of the layout: scratch memory, and the list of all groups ever created. megatron-core 0.17 and newer have
# no _GLOBAL_SYMMETRIC_MEMORY_BUFFER.
_SHARED = {"_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "_global_process_group_list"}


class ReferenceLayout:
    """Process groups of a second layout, which `active` swaps in. All ranks create it together."""

    def __init__(self, layout: Layout, timeout_minutes: int) -> None:
        first = _current_groups()
        shared = {name: value for name, value in vars(parallel_state).items() if name in _SHARED}
        _set_groups(dict.fromkeys([*first, *shared]))  # destroy_model_parallel would also destroy some of the groups
        parallel_state._HYBRID_DP_CP_GROUPS = {}
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor_model_parallel_size,
                pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
                context_parallel_size=layout.context_parallel_size,
                expert_model_parallel_size=layout.expert_model_parallel_size,
                expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
                distributed_timeout_minutes=timeout_minutes,
            )
            self._groups = {**_current_groups(), "bridge": None}
        finally:
            _set_groups(first)
            _set_groups(shared)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this layout the current one inside the context."""
        first = {**_current_groups(), "bridge": gpt_bridge.EP_PP_GROUP}
        _set_groups(self._groups)
        gpt_bridge.EP_PP_GROUP = self._groups["bridge"]  # mcore-bridge creates it on first use
        try:
            yield
        finally:
            self._groups["bridge"] = gpt_bridge.EP_PP_GROUP
            _set_groups(first)
            gpt_bridge.EP_PP_GROUP = first["bridge"]


def _current_groups() -> dict[str, Any]:
    """Return Megatron's groups, ranks and sizes: the private variables of parallel_state."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper() and name not in _SHARED
    }


def _set_groups(groups: dict[str, Any]) -> None:
    for name, value in groups.items():
        if name != "bridge":
            setattr(parallel_state, name, value)

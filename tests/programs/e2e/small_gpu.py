"""An external plugin for tests: it simulates a GPU with room for either vLLM or the trained state.

A CPU platform has no device memory that could run out, so otherwise nothing would ever be offloaded.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_megatron_grpo.runtime.import_hooks import after_import


def _set_memory_to_wake(local: Any) -> None:
    local.LocalVllm.memory_to_wake = property(lambda self: 2**30)


torch.cuda.mem_get_info = lambda device=None: (0, 2**30)
after_import("swift_megatron_grpo.generation.local.engine", _set_memory_to_wake)

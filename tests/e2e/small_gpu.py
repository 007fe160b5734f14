"""An external plugin for tests: this machine's memory is that of a GPU with room for either vLLM or the trained state.

A CPU has no memory of its own to run out of, so nothing would ever have to leave it.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_megatron_grpo.import_hooks import after_import


def _vllm_wants_it_all(local: Any) -> None:
    local.LocalVllm.memory_to_wake = property(lambda self: 2**30)


torch.cuda.mem_get_info = lambda device=None: (0, 2**30)
after_import("swift_megatron_grpo.generation.local.engine", _vllm_wants_it_all)

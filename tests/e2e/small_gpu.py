"""An external plugin for tests: this machine's memory is that of a GPU with room for either vLLM or the trained state.

A CPU has no memory of its own to run out of, so nothing would ever have to leave it.
"""

from __future__ import annotations

from swift_megatron_grpo.generation.local import LocalVllm
from swift_megatron_grpo.training import residency

residency.torch.cuda.mem_get_info = lambda device=None: (0, 2**30)
LocalVllm.memory_to_wake = property(lambda self: 2**30)  # type: ignore[assignment, method-assign]

"""External plugin for tests: injects a fault into the last rank after the second step.

FAULT=memory (no train phase has memory left), memory_once (the first one has none), wake or kill.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

from swift_megatron_grpo.training import passes


class FaultCallback(MegatronCallback):
    def on_step_end(self) -> None:
        if self.state.iteration != 2 or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        if os.environ["FAULT"] == "wake":  # as if another process had allocated nearly all free memory
            self.allocated = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.98), dtype=torch.uint8, device="cuda")
            return
        schedule, numbers = passes.get_forward_backward_func, itertools.count(1)

        def run_with_fault(**options: Any) -> Any:
            with nullcontext() if options["forward_only"] else fault_of_train_phase(next(numbers)):
                return schedule()(**options)

        passes.get_forward_backward_func = lambda: run_with_fault


def fault_of_train_phase(number: int) -> AbstractContextManager[None]:
    fault = os.environ["FAULT"]
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return no_memory() if fault == "memory" or number == 1 else nullcontext()


@contextmanager
def no_memory() -> Iterator[None]:
    """Keep PyTorch from taking more memory from the GPU, and allocate all that it has left of what it took."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    blocks = []
    for exponent in range(28, 8, -1):
        with suppress(torch.OutOfMemoryError):
            while True:
                blocks.append(torch.empty(2**exponent, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        blocks.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


megatron_callbacks_map["fault"] = FaultCallback

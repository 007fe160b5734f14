"""External plugin for tests: injects a fault into the last rank after the second step. FAULT=memory, wake or kill."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

from swift_megatron_grpo.training import schedule


class FaultCallback(MegatronCallback):
    def on_step_end(self) -> None:
        if self.state.iteration != 2 or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        if os.environ["FAULT"] == "wake":  # as if another process had allocated nearly all free memory
            self.allocated = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.98), dtype=torch.uint8, device="cuda")
            return
        inject = {"memory": limit_memory_to_current_use, "kill": kill_this_process}[os.environ["FAULT"]]
        run = schedule.run

        def run_with_fault(*args: Any, **kwargs: Any) -> Any:
            inject()
            return run(*args, **kwargs)

        schedule.run = run_with_fault


def limit_memory_to_current_use() -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


megatron_callbacks_map["fault"] = FaultCallback

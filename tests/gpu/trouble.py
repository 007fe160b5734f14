"""An external plugin for tests: TROUBLE=memory, wake or kill befalls the last rank in the second step."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

from swift_megatron_grpo.training import schedule


class TroubleCallback(MegatronCallback):
    def on_step_end(self) -> None:
        if self.state.iteration != 2 or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        if os.environ["TROUBLE"] == "wake":  # somebody else has taken the GPU
            self.taken = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.98), dtype=torch.uint8, device="cuda")
            return
        befall = {"memory": leave_hardly_more_than_there_is, "kill": die}[os.environ["TROUBLE"]]
        run = schedule.run

        def run_into_trouble(*args: Any, **kwargs: Any) -> Any:
            befall()
            return run(*args, **kwargs)

        schedule.run = run_into_trouble


def leave_hardly_more_than_there_is() -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


megatron_callbacks_map["trouble"] = TroubleCallback

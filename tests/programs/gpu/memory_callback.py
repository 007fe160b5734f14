"""External plugin for tests: writes the bytes that torch has allocated at the end of every step to memory.json."""

from __future__ import annotations

import json
import os

import torch
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback


class MemoryCallback(MegatronCallback):
    def on_train_begin(self) -> None:
        self.allocated: list[int] = []

    def on_step_end(self) -> None:
        self.allocated.append(torch.cuda.memory_allocated())
        if torch.distributed.get_rank() == 0:
            with open(os.path.join(self.args.output_dir, "memory.json"), "w") as file:
                json.dump(self.allocated, file)


megatron_callbacks_map["memory"] = MemoryCallback

"""An external plugin of the trainer: once checkpoint-1 is complete, rank 1 can write no file above 300 kB.

The limit stands in for a disk that another process fills, and needs no rights.

megatron rlhf ... --external_plugins .../small_files.py --callbacks small_files
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback


class SmallFiles(MegatronCallback):
    def on_step_begin(self) -> None:
        if os.environ["RANK"] == "1" and Path(self.args.output_dir, "checkpoint-1", "manifest.json").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))


megatron_callbacks_map["small_files"] = SmallFiles

"""An external plugin for tests: vLLM's own digests of its weights, before the first sync and after each training step.

megatron rlhf ... --external_plugins .../witness.py --callbacks witness

They are written to digests.RANK.json in --output_dir. Only an engine in a training process has them here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests


class WitnessCallback(MegatronCallback):
    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.digests: list[dict[str, str]] = []

    def on_step_begin(self) -> None:
        if not self.digests:
            self._read()

    def on_step_end(self) -> None:
        self._read()

    def _read(self) -> None:
        trainer: Any = self.trainer
        self.digests.append(compute_tensor_digests(trainer.loop.stages.generation._worker.get_model()))
        file = Path(trainer.args.output_dir) / f"digests.{dist.get_rank()}.json"
        file.write_text(json.dumps(self.digests))


megatron_callbacks_map["witness"] = WitnessCallback

"""An external plugin for tests: on every save, write the log-probs of a fixed sequence to probe.json.

megatron rlhf ... --external_plugins .../probe.py --callbacks probe
"""

from __future__ import annotations

import json
import os
from typing import Any

from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback
from swift.utils import is_last_rank

from swift_megatron_grpo.types import Sample

TOKENS = [(7 * i) % 250 for i in range(1, 41)]


class ProbeCallback(MegatronCallback):
    def on_save(self, output_dir: str) -> None:
        trainer: Any = self.trainer
        sample = Sample(tokens=TOKENS, completion_mask=[False] + [True] * (len(TOKENS) - 1), advantage=0.0)
        engine = trainer.loop.stages.training
        values = engine.infer([sample] * 8)  # enough for every rank and micro batch of these tests
        if is_last_rank():  # the last pipeline stage
            with open(os.path.join(output_dir, "probe.json"), "w") as file:
                json.dump({"tokens": TOKENS, "temperature": trainer.args.temperature,
                           "logprobs": next(iter(values.values())).logprobs}, file)  # fmt: skip


megatron_callbacks_map["probe"] = ProbeCallback

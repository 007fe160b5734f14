"""An external plugin of the trainer: each optimizer step takes SECONDS longer, as with a larger model.

The duration of all steps is written to seconds.json.

megatron rlhf ... --external_plugins .../slow_training.py --callbacks stopwatch
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

from swift_megatron_grpo.training.engine import MegatronEngine

train_step = MegatronEngine.train_step


def train_slowly(*args: Any, **kwargs: Any) -> Any:
    time.sleep(float(os.environ["SECONDS"]))
    return train_step(*args, **kwargs)


MegatronEngine.train_step = train_slowly  # type: ignore[method-assign]


class Stopwatch(MegatronCallback):
    began: float | None = None

    def on_step_begin(self) -> None:
        self.began = self.began or time.monotonic()

    def on_step_end(self) -> None:
        assert self.began is not None
        with open(os.path.join(self.args.output_dir, "seconds.json"), "w") as file:
            json.dump(time.monotonic() - self.began, file)


megatron_callbacks_map["stopwatch"] = Stopwatch

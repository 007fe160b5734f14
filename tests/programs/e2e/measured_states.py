"""An external plugin: on every save, write the bytes of a rank's weights and optimizer states to states.json.

megatron rlhf ... --external_plugins .../measured_states.py --callbacks measured_states
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

from swift_megatron_grpo.training.memory.offload import torch_optimizers


def total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class MeasuredStates(MegatronCallback):
    def on_save(self, output_dir: str) -> None:
        trainer: Any = self.trainer
        weights = [parameter for model in trainer.unwrapped_models for parameter in model.parameters()]
        optimizers = list(torch_optimizers(trainer.optimizer))
        masters = [each for inner in optimizers for group in inner.param_groups for each in group["params"]]
        states = [value for inner in optimizers for state in inner.state.values() for value in state.values()]
        moments = [value for value in states if torch.is_tensor(value) and value.ndim]
        measured = {
            "weights": total(weights),
            "gradients": sum(weight.numel() for weight in weights if weight.requires_grad),
            "optimizer": total(masters) + total(moments),
        }
        with open(os.path.join(output_dir, "states.json"), "w") as file:
            json.dump(measured, file)


megatron_callbacks_map["measured_states"] = MeasuredStates

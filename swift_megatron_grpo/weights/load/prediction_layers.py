"""A model of vLLM with its layers of multi-token prediction, which vLLM holds as another model, as one model."""

from itertools import groupby
from typing import Any

import torch

from swift_megatron_grpo.weights.export.prediction_layers import is_prediction
from swift_megatron_grpo.weights.transport.buckets import NamedWeights


class WithPredictionLayers(torch.nn.Module):
    """Loads each tensor into the model that has it. Embedding and output layer are those of the first."""

    def __init__(self, model: Any, prediction: Any) -> None:
        super().__init__()
        self.model, self.prediction = model, prediction

    def load_weights(self, weights: NamedWeights) -> set[str]:
        loaded = set[str]()
        for is_prediction_layer, some in groupby(weights, lambda named: is_prediction(named[0])):
            place = "prediction" if is_prediction_layer else "model"
            reported = getattr(self, place).load_weights(some)
            loaded |= {f"{place}.{name}" for name in reported or ()}
        return loaded

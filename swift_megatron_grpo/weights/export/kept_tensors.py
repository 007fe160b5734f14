"""Tensors of the checkpoint that training leaves out on purpose, and that are saved again as they were.

Layers of multi-token prediction are neither built nor trained, nor is the vision tower with --language_model_only.
mcore-bridge saves what it has built, so the saved model would lack them without a word: a deployment that decodes
speculatively would fail. It can copy them from the source checkpoint (--save_missing_weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_bridge.bridge.gpt_bridge import SafetensorLazyLoader
from mcore_bridge.config import ModelConfig

from swift_megatron_grpo.weights.export.tensor_names import (
    is_copy_of_embedding,
    is_prediction_layer,
    is_unbuilt_vision_tower,
)
from swift_megatron_grpo.weights.stored_tensors import stored_tensors

_SHOWN = 3  # tensors that the note names


@dataclass(frozen=True, slots=True)
class KeptTensors:
    note: str | None  # for the log; None: there are no untrained tensors
    bytes: int  # that they add to every whole model that is saved


def keep_untrained_tensors(bridge: Any, config: ModelConfig, source: str, keep: bool | None) -> KeptTensors:
    """Save such tensors with the model, unless `keep` is False.

    `source`: the folder of the checkpoint. `keep`: --save_missing_weights, which also copies any other tensor that the
    model does not have. A copy of a tied embedding is never saved: its values would be those before training.
    """
    with SafetensorLazyLoader(source) as loader:
        names = sorted(loader.get_state_dict())
    untrained = [name for name in names if is_prediction_layer(name, config) or is_unbuilt_vision_tower(name, config)]
    stale = {name for name in names if is_copy_of_embedding(name, config)}
    others = set() if keep else {*names} - {*untrained}
    save_weights = bridge.save_weights
    copy_missing = bridge._save_missing_weights

    def save_with_untrained(*args: Any, save_missing_weights: str | bool | None = None, **options: Any) -> None:
        wanted = save_missing_weights or (source if untrained and keep is not False else False)
        save_weights(*args, save_missing_weights=wanted, **options)

    def copy_untrained(saver: Any, saved: set[str], folder: str | None = None) -> None:
        copy_missing(saver, saved | stale | others, folder)

    bridge.save_weights = save_with_untrained
    bridge._save_missing_weights = copy_untrained
    note = _note(untrained, saved=keep is not False) if untrained else None
    return KeptTensors(note, 0 if keep is False else _bytes_of(untrained, source))


def _bytes_of(names: Sequence[str], source: str) -> int:
    stored = stored_tensors(source) if names else {}
    return sum(stored[name].bytes for name in names)


def _note(names: Sequence[str], saved: bool) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    what = f"{len(names)} tensors of the checkpoint are not trained ({', '.join(names[:_SHOWN])}{more})"
    if saved:
        return f"{what}; they are saved with the model as they were (--save_missing_weights false leaves them out)"
    return f"{what}, and --save_missing_weights false leaves them out of saved models"

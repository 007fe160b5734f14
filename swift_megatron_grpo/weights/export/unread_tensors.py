"""Refuses checkpoints with tensors that nothing loads, and names those that are missing.

mcore-bridge reads the tensors that its conversion of an architecture asks for, and ignores all others. A tensor under
another name, or one that the conversion does not have, such as the bias of an attention output, would be left out of
training, and a bias that the model trains in its place would be random or zero.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mcore_bridge.bridge import gpt_bridge
from mcore_bridge.config import ModelConfig

from swift_megatron_grpo.runtime.parallel import max_over_ranks
from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.settings.run import UnreadTensors
from swift_megatron_grpo.weights.export import kept_tensors

logger = logging.getLogger(__name__)
_SHOWN = 5  # tensors that an error names

# Names of tensors that training leaves out on purpose.
_HARMLESS = (
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$",  # buffers that are computed from config.json
    r"\.(k_scale|v_scale|kv_scale|k_zero_point|v_zero_point)$",  # scales of a quantized KV cache, which vLLM computes
    r"(^|\.)(attn|attention)\.(masked_bias|bias_mask)$",  # causal masks
)


class _RecordingLoader(gpt_bridge.SafetensorLazyLoader):
    """mcore-bridge's reader of a checkpoint, which records the names of the tensors that it reads."""

    loaders: list[_RecordingLoader]

    def __init__(self, hf_model_dir: str, peft_format: bool = False) -> None:
        super().__init__(hf_model_dir, peft_format=peft_format)
        self.names = sorted(self._weight_map)
        self.read: dict[str, None] = {}  # in the order of reading
        self.loaders.append(self)
        if not self.names:
            raise ValueError(
                f"{hf_model_dir} has no weights: neither an index nor a file of the form "
                f"{'adapter_model' if peft_format else 'model'}.safetensors; correct the path, or convert the weights"
            )

    def _load_tensor(self, key: str) -> torch.Tensor:
        self.read[key] = None
        tensor: torch.Tensor = super()._load_tensor(key)
        return tensor

    def _load_tensor_slice(self, key: str, slices: Any) -> torch.Tensor:
        self.read[key] = None
        part: torch.Tensor = super()._load_tensor_slice(key, slices)
        return part


@contextmanager
def every_tensor_read(config: ModelConfig, unread: UnreadTensors) -> Iterator[None]:
    """Refuse (with --unread_tensors warn: log) tensors of a checkpoint loaded in the context that no rank reads."""
    loaders: list[_RecordingLoader] = []
    recording = type("Loader", (_RecordingLoader,), {"loaders": loaders})
    try:
        with replaced(gpt_bridge, "SafetensorLazyLoader", recording):
            yield
    except KeyError as error:
        if loaders:
            raise ValueError(_missing(loaders[-1], str(error.args[0]))) from error
        raise
    for loader in loaders:
        was_read = [name in loader.read for name in loader.names]
        by_any = max_over_ranks(torch.tensor(was_read, dtype=torch.int32, device=torch.cuda.current_device())).tolist()
        read_by_none = [name for name, seen in zip(loader.names, by_any, strict=True) if not seen]
        names = [name for name in read_by_none if not is_harmless(name, config)]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            fault = (
                f"{len(names)} tensors of {loader.hf_model_dir} are loaded by nothing, so they would be neither "
                f"trained nor sent to vLLM: {', '.join(names[:_SHOWN])}{more}"
            )
            if unread == "stop":
                raise ValueError(
                    f"{fault}; correct their names, remove them, or check that mcore-bridge supports the architecture "
                    "in config.json. --unread_tensors warn trains without them"
                )
            logger.warning(f"{fault} (--unread_tensors warn)")


def is_harmless(name: str, config: ModelConfig) -> bool:
    """Return True for a tensor that the model does not need."""
    return (
        kept_tensors.is_copy_of_embedding(name, config)
        or kept_tensors.is_prediction_layer(name, config)
        or kept_tensors.is_unbuilt_vision_tower(name, config)
        or any(re.search(pattern, name) for pattern in _HARMLESS)
    )


def _missing(loader: _RecordingLoader, key: str) -> str:
    """Return the error for a tensor that the checkpoint lacks. `key`: its name, or the end of it."""
    last_read = next(reversed(loader.read), "")
    layer = re.match(r".*layers\.\d+\.", last_read)  # the one that was being loaded
    unread = [name for name in loader.names if name not in loader.read and name.startswith(layer[0] if layer else "")]
    parts = len(key.split("."))
    by_end = {".".join(name.split(".")[-parts:]): name for name in unread}
    similar = [by_end[end] for end in difflib.get_close_matches(key, by_end, n=3)]
    hint = f" (similar names that were not loaded: {', '.join(similar)})" if similar else ""
    return (
        f"{loader.hf_model_dir} has no tensor whose name ends with {key}, which the architecture in its config.json "
        f"has{hint}; correct the name in the checkpoint, or config.json"
    )

"""Parts of the source that training leaves out on purpose, and that are saved again as they were.

Layers of multi-token prediction are neither built nor trained, nor is the vision tower with --language_model_only.
mcore-bridge saves what it has built, so the saved model would lack them without a word: a deployment that decodes
speculatively would fail. It can copy them from the source checkpoint (--save_missing_weights). It writes config.json
alone: without generation_config.json, vLLM and transformers would sample with other defaults, and stop at fewer tokens.
"""

import re
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from mcore_bridge.config import ModelConfig
from mcore_bridge.utils import is_master

from swift_megatron_grpo.runtime.replaced import replaced
from swift_megatron_grpo.weights.stored_tensors import stored_tensors

_SHOWN = 3  # tensors that the note names


def vision_tower_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Return the name prefixes of image, video and audio parts; () for a text model.

    Models that were released before transformers 4.52 have other names in checkpoints than in transformers:
    hf_state_dict_mapping has pairs of the two.
    """
    return tuple(_towers(config))


def prefixes_without(held: Set[str], config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of the parts that embed none of these kinds of media (image, video, audio)."""
    return tuple(prefix for prefix, kinds in _towers(config).items() if not kinds & held)


def _towers(config: ModelConfig) -> dict[str, frozenset[str]]:
    """Return the kinds of media that each of these parts embeds, by its prefix."""
    towers = config.model_meta.visual_cls
    if towers is None:
        return {}
    kinds = {
        name: frozenset(("audio",) if module == "audio_tower" else ("image", "video"))
        for name, module in towers.module_mapping.items()
    }
    released = config.model_meta.bridge_cls.hf_state_dict_mapping
    kinds |= {old: kinds[new] for old, new in released.items() if new in kinds}
    return {f"{name}.": embedded for name, embedded in kinds.items()}


def is_copy_of_embedding(name: str, config: ModelConfig) -> bool:
    """Return True for the output layer of a model that shares the weights of its embedding."""
    return name.endswith("lm_head.weight") and not config.untie_embeddings_and_output_weights


def is_prediction_layer(name: str, config: ModelConfig) -> bool:
    """Return True for multi-token prediction that is not trained; some models number its layers after the decoder's."""
    if config.mtp_num_layers:
        return False
    if re.search(r"(^|\.)mtp([._]|$)", name):
        return True
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return (
        layer is not None and int(layer[1]) >= config.num_layers and not name.startswith(vision_tower_prefixes(config))
    )


def is_unbuilt_vision_tower(name: str, config: ModelConfig) -> bool:
    """Return True for a part that embeds images, video or audio, or speaks, with --language_model_only."""
    if not config.language_model_only:
        return False
    return name.startswith((*vision_tower_prefixes(config), *speech_prefixes(config)))


def speech_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Return the name prefixes of parts that speak. mcore-bridge trains none, and copies them if it builds towers."""
    return tuple(f"{name}." for name in vars(config.model_meta.visual_cls).get("_generator", ()))


class KeptTensors(NamedTuple):
    note: str | None  # for the log; None: there are no untrained tensors
    bytes: int  # that they add to every whole model that is saved


def keep_untrained_tensors(bridge: Any, config: ModelConfig, source: str, keep: bool | None) -> KeptTensors:
    """Save such tensors with the model, unless `keep` is False, and generation_config.json.

    `source`: the folder of the checkpoint. `keep`: --save_missing_weights, which also copies any other tensor that the
    model does not have. A copy of a tied embedding is never saved: its values would be those before training.
    """
    stored = stored_tensors(source)
    names = sorted(stored)
    untrained = [name for name in names if is_prediction_layer(name, config) or is_unbuilt_vision_tower(name, config)]
    stale = {name for name in names if is_copy_of_embedding(name, config)}
    others = set() if keep else {*names} - {*untrained}
    save_weights = bridge.save_weights
    copy_missing = bridge._save_missing_weights

    def save_with_untrained(
        models: Any, folder: str, *args: Any, save_missing_weights: str | bool | None = None, **options: Any
    ) -> None:
        wanted = save_missing_weights or (source if untrained and keep is not False else False)
        # peft looks for an adapter's modules by their names in transformers, not by those of an older checkpoint
        mapping = {} if options.get("peft_format") else bridge.hf_state_dict_mapping
        with replaced(bridge, "hf_state_dict_mapping", mapping):
            save_weights(models, folder, *args, save_missing_weights=wanted, **options)
        defaults = Path(source, "generation_config.json")
        if defaults.is_file() and not options.get("peft_format") and is_master():
            shutil.copyfile(defaults, Path(folder, defaults.name))

    def copy_untrained(saver: Any, saved: set[str], folder: str | None = None) -> None:
        copy_missing(saver, saved | stale | others, folder)

    bridge.save_weights = save_with_untrained
    bridge._save_missing_weights = copy_untrained
    if not untrained:
        return KeptTensors(None, 0)
    more = ", ..." if len(untrained) > _SHOWN else ""
    note = f"{len(untrained)} tensors of the checkpoint are not trained ({', '.join(untrained[:_SHOWN])}{more})"
    if keep is False:
        return KeptTensors(f"{note}, and --save_missing_weights false leaves them out of saved models", 0)
    note += "; they are saved with the model as they were (--save_missing_weights false leaves them out)"
    return KeptTensors(note, sum(stored[name].bytes for name in untrained))

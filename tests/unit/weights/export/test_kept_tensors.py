"""Tensors that are not trained are saved as they were, unless the user refuses; stale copies are never saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore_bridge.bridge.gpt_bridge import SafetensorLazyLoader
from mcore_bridge.model.mm_gpts.qwen import Qwen2_5Omni_Vit
from mcore_bridge.model.mm_gpts.qwen3_omni import Qwen3Omni_Vit
from safetensors.torch import save_file

from swift_megatron_grpo.weights.export.kept_tensors import keep_untrained_tensors, prefixes_without

TRAINED, VISION_TOWER = "model.language_model.layers.0.mlp.weight", "model.visual.blocks.0.weight"
OTHERS = {"model.rotary_emb.inv_freq"}  # copied only if the user asks for every missing tensor
NAMES = [TRAINED, VISION_TOWER, "lm_head.weight", "mtp.fc.weight", "model.rotary_emb.inv_freq"]
OLDER_NAMES = {"visual": "model.visual"}  # of a checkpoint


class Bridge:
    """Saves what `built` names; the rest of mcore-bridge's logic for missing tensors is in `_save_missing_weights`."""

    def __init__(self, built: list[str]) -> None:
        self.hf_state_dict_mapping = OLDER_NAMES
        self.built = built
        self.saved: list[str] = []

    def save_weights(
        self, models: object, folder: str, save_missing_weights: str | bool = False, peft_format: bool = False
    ) -> None:
        self.saved, self.mapping = list(self.built), self.hf_state_dict_mapping
        if save_missing_weights:
            self._save_missing_weights(None, {*self.built}, str(save_missing_weights))

    def _save_missing_weights(self, saver: object, saved: set[str], source: str) -> None:
        with SafetensorLazyLoader(source) as loader:
            self.saved += sorted({*loader.get_state_dict()} - saved)


def config(tied: bool = False, language_model_only: bool = False, mtp_num_layers: int | None = None) -> Any:
    towers = SimpleNamespace(module_mapping={"model.visual": "visual"})
    return SimpleNamespace(
        num_layers=4,
        untie_embeddings_and_output_weights=not tied,
        language_model_only=language_model_only,
        mtp_num_layers=mtp_num_layers,
        model_meta=SimpleNamespace(visual_cls=towers, bridge_cls=SimpleNamespace(hf_state_dict_mapping={})),
    )


@pytest.fixture
def source(tmp_path: Path) -> str:
    save_file({name: torch.ones(2) for name in NAMES}, tmp_path / "model.safetensors", {"format": "pt"})
    return str(tmp_path)


def saved(source: str, built: list[str], keep: bool | None, typed: str | bool = False, **settings: Any) -> Any:
    bridge = Bridge(built)
    kept = keep_untrained_tensors(bridge, config(**settings), source, keep)
    bridge.save_weights(None, "out", save_missing_weights=typed)
    added = {*bridge.saved} - {*built} - OTHERS
    assert kept.bytes == len(added) * 2 * 4  # the full-disk check counts them
    return kept.note, bridge.saved


def test_prediction_layers_are_saved_and_noted(source: str) -> None:
    note, names = saved(source, [TRAINED, VISION_TOWER, "lm_head.weight"], keep=None)
    assert names == [TRAINED, VISION_TOWER, "lm_head.weight", "mtp.fc.weight"]
    assert note == (
        "1 tensors of the checkpoint are not trained (mtp.fc.weight); they are saved with the model as they were "
        "(--save_missing_weights false leaves them out)"
    )


def test_a_prediction_layer_that_is_trained_is_saved_by_mcore_bridge(source: str) -> None:
    built = [TRAINED, VISION_TOWER, "lm_head.weight", "mtp.fc.weight"]
    assert saved(source, built, keep=None, mtp_num_layers=1) == (None, built)


def test_the_user_can_leave_them_out(source: str) -> None:
    note, names = saved(source, [TRAINED, VISION_TOWER, "lm_head.weight"], keep=False)
    assert names == [TRAINED, VISION_TOWER, "lm_head.weight"]
    assert note.endswith("and --save_missing_weights false leaves them out of saved models")


def test_the_user_can_copy_every_missing_tensor_but_no_stale_embedding(source: str) -> None:
    _, names = saved(source, [TRAINED, VISION_TOWER], keep=True, typed=source, tied=True)
    assert names == [TRAINED, VISION_TOWER, "model.rotary_emb.inv_freq", "mtp.fc.weight"]


def test_towers_that_are_not_built_are_saved(source: str) -> None:
    note, names = saved(source, [TRAINED, "lm_head.weight"], keep=None, language_model_only=True)
    assert names == [TRAINED, "lm_head.weight", VISION_TOWER, "mtp.fc.weight"]
    assert note.startswith("2 tensors of the checkpoint are not trained")


@pytest.mark.parametrize("towers", [Qwen2_5Omni_Vit, Qwen3Omni_Vit])
def test_parts_that_speak_are_saved_by_mcore_bridge_or_as_untrained(source: str, towers: Any) -> None:
    """mcore-bridge copies them where it builds the parts for images and audio, so without these they are to be kept."""
    parts = [f"{name}.0.weight" for name in ("thinker.visual", "thinker.audio_tower", *towers._generator)]
    save_file({name: torch.ones(2) for name in [TRAINED, *parts]}, Path(source, "model.safetensors"), {"format": "pt"})
    for alone, built, added in ((True, [TRAINED], parts), (False, [TRAINED, *parts], [])):
        omni = config(language_model_only=alone)
        omni.model_meta.visual_cls = towers
        bridge = Bridge(built)
        note, _ = keep_untrained_tensors(bridge, omni, source, None)
        bridge.save_weights(None, "out")
        assert sorted(bridge.saved) == sorted([TRAINED, *parts])
        assert note is None if not added else str(note).startswith(f"{len(added)} tensors of the checkpoint are not")


def test_parts_are_left_out_by_the_media_that_they_embed() -> None:
    omni, older = config(), config()
    omni.model_meta.visual_cls = Qwen3Omni_Vit
    seeing, hearing = "thinker.visual.", "thinker.audio_tower."
    assert {*prefixes_without(frozenset(), omni)} == {seeing, hearing}
    for held, left_out in (({"image"}, hearing), ({"video", "image"}, hearing), ({"audio"}, seeing)):
        assert prefixes_without(held, omni) == (left_out,)
    assert prefixes_without({"video", "audio"}, omni) == ()
    older.model_meta.bridge_cls.hf_state_dict_mapping = OLDER_NAMES
    assert (
        prefixes_without({"audio"}, older) == ("model.visual.", "visual.") and prefixes_without({"image"}, older) == ()
    )
    older.model_meta.visual_cls = None
    assert prefixes_without(frozenset(), older) == ()


def test_a_model_without_such_tensors_is_saved_as_ever(tmp_path: Path) -> None:
    save_file({TRAINED: torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert saved(str(tmp_path), [TRAINED], keep=None) == (None, [TRAINED])


def test_a_whole_model_is_saved_with_the_sampling_defaults_of_its_source(source: str, tmp_path: Path) -> None:
    defaults = '{"temperature": 0.6, "eos_token_id": [1, 2]}'
    Path(source, "generation_config.json").write_text(defaults)
    bridge = Bridge([TRAINED])
    keep_untrained_tensors(bridge, config(), source, None)
    for name, is_adapter in (("whole", False), ("adapter", True)):
        (tmp_path / name).mkdir()
        bridge.save_weights(None, str(tmp_path / name), peft_format=is_adapter)
    assert (tmp_path / "whole" / "generation_config.json").read_text() == defaults
    assert not list((tmp_path / "adapter").iterdir())


def test_an_adapter_is_saved_under_the_names_of_transformers(source: str, tmp_path: Path) -> None:
    bridge = Bridge([TRAINED])
    keep_untrained_tensors(bridge, config(), source, None)
    for is_adapter, mapping in ((True, {}), (False, OLDER_NAMES)):
        bridge.save_weights(None, str(tmp_path), peft_format=is_adapter)
        assert bridge.mapping == mapping

"""Bytes that the audio part of Qwen3-Omni keeps, against what autograd saves in transformers' class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from swift_megatron_grpo.cli.check.model import audio_part_of
from swift_megatron_grpo.cli.check.rows import tokens_of_chunks
from swift_megatron_grpo.cli.estimate.activations import Decoder, MediaTokens, Tokens
from swift_megatron_grpo.cli.estimate.audio_part import (
    CHUNK_TOKENS,
    AudioPart,
    bytes_at_one_time,
    bytes_of_audio_part,
)
from swift_megatron_grpo.cli.estimate.memory import GRADIENT_BYTES, RankMemory, Training, plan_memory, with_budget
from swift_megatron_grpo.cli.estimate.parameters import tensors_of
from swift_megatron_grpo.settings.layout import Layout
from swift_megatron_grpo.types import ModelRecording, SoundPart

ROWS, SECONDS = 512, 12
SIZES: dict[str, Any] = {"encoder_layers": 4, "d_model": 256, "encoder_ffn_dim": 704, "encoder_attention_heads": 4,
                         "downsample_hidden_size": 48, "output_dim": ROWS}  # fmt: skip


def sizes_of() -> AudioPart:
    part = audio_part_of("qwen3_omni_moe", SIZES, ROWS)
    assert part is not None
    return part


def saved_bytes(checkpointing: bool, trains_tower: bool) -> int:
    """Return the bytes of all tensors that autograd keeps of a forward pass, weights aside."""
    config = AutoConfig.for_model("qwen3_omni_moe", thinker_config={"audio_config": SIZES})
    sizes = config.thinker_config.audio_config
    sizes._attn_implementation = "sdpa"
    torch.manual_seed(0)
    part = Qwen3OmniMoeAudioEncoder(sizes).to(torch.bfloat16).train()
    if checkpointing:
        part.gradient_checkpointing_enable()
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(trains_tower or name.startswith("proj"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    features = torch.randn(sizes.num_mel_bins, 100 * SECONDS, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = part(features, torch.tensor([features.shape[1]])).last_hidden_state
    assert output.requires_grad and len(output) == SECONDS * CHUNK_TOKENS
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("checkpointing", "trains_tower"), [(False, True), (True, True), (False, False)], ids=["all", "inputs", "aligner"]
)
def test_a_trained_audio_part_keeps_what_autograd_saves(checkpointing: bool, trains_tower: bool) -> None:
    planned = bytes_of_audio_part(sizes_of(), SECONDS * CHUNK_TOKENS, trains_tower, True, checkpointing)
    assert planned == pytest.approx(saved_bytes(checkpointing, trains_tower), rel=0.03)


TENSORS = tensors_of({
    "model.embed_tokens.weight": (1000, ROWS),
    "visual.blocks.0.attn.qkv.weight": (768, 256),
    "visual.merger.mlp.0.weight": (1024, 1024),
    "audio_tower.layers.0.fc1.weight": (704, 256),
    "audio_tower.proj1.weight": (256, 256),
})  # fmt: skip
SEEING, HEARING, HEARING_ALIGNER = 768 * 256 + 1024 * 1024, 704 * 256, 256 * 256
DECODER = Decoder(layers=2, hidden=ROWS, queries=512, keys=128, ffn=1024, vocabulary=1000, tied=True)
HEARD = MediaTokens(shown=2600, distinct=1300, of_rollout=5200)
TRAINING = Training(Layout(2, pipeline_model_parallel_size=2), Tokens(4096, 4096, 1024), micro_batches=2,
                    trains_language=False, recordings=HEARD)  # fmt: skip
EVERYTHING = {"trains_vision_tower": True, "trains_aligner": True}


def planned(part: AudioPart | None, **changes: Any) -> list[RankMemory]:
    return plan_memory(TENSORS, DECODER, replace(TRAINING, **changes), None, 1e12, audio_part=part)


def test_a_part_without_rows_is_not_trained() -> None:
    def gradients(**changes: Any) -> float:
        return planned(sizes_of(), **EVERYTHING, **changes)[0].gradients / GRADIENT_BYTES

    assert gradients() == SEEING + HEARING + HEARING_ALIGNER
    assert gradients(hears=False) == SEEING
    assert gradients(sees=False) == HEARING + HEARING_ALIGNER
    # Its adapters exist: they are weights without gradients. ms-swift gives none to the audio part's aligner.
    assert gradients(sees=False, lora_rank=2) == 2 * (704 + 256)
    weights = [planned(sizes_of(), **EVERYTHING, sees=sees, lora_rank=2)[0].weights for sees in (True, False)]
    assert weights[0] == weights[1]


def test_a_frozen_part_keeps_rows_and_a_trained_one_what_autograd_saves() -> None:
    """The first pipeline stage alone has an audio part."""
    without = [rank.activations for rank in planned(None)]
    frozen = [rank.activations for rank in planned(sizes_of())]
    assert frozen == [without[0] + HEARD.of_rollout * ROWS * 2, without[1]]
    trained = [rank.activations for rank in planned(sizes_of(), **EVERYTHING)]
    kept = bytes_of_audio_part(sizes_of(), HEARD.distinct, True, True, True)
    assert trained == [pytest.approx(without[0] + 2 * kept), without[1]]  # of two micro batches
    unheard = [rank.activations for rank in planned(sizes_of(), **EVERYTHING, hears=False, recordings=MediaTokens())]
    assert unheard == without


def test_a_smaller_budget_plays_fewer_recordings_at_one_time() -> None:
    assert with_budget(TRAINING, 1024).recordings == MediaTokens(shown=650, distinct=325, of_rollout=5200)


def test_recordings_are_computed_in_whole_chunks_and_one_by_one() -> None:
    def recording(tokens: int) -> ModelRecording:
        return ModelRecording(str(tokens), tokens, lambda: torch.zeros(0))

    sound = recording(CHUNK_TOKENS + 1)
    parts = [SoundPart(sound, 0, CHUNK_TOKENS, ends=False), SoundPart(sound, CHUNK_TOKENS, 1, ends=True)]
    assert tokens_of_chunks([recording(CHUNK_TOKENS), recording(1), *parts]) == 4 * CHUNK_TOKENS
    longest = 30 * CHUNK_TOKENS
    assert bytes_at_one_time(sizes_of(), 2 * longest) == bytes_at_one_time(sizes_of(), longest)
    assert bytes_at_one_time(sizes_of(), CHUNK_TOKENS) == 2 * 48 * 64 * 50 * 2  # two tensors in 16 bits

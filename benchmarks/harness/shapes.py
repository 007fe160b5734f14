"""Sizes of the models that benchmarks measure, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from swift_megatron_grpo.packing.flops import DeltaNets

DEVIATION = 0.02  # of random weights


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3, Qwen3-MoE, Qwen3.5, Qwen-VL or Qwen3-Omni; the names follow its config.json where short."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    experts: int = 0  # of each layer, each with `ffn` channels; 0: a dense model
    experts_per_token: int = 1
    shared_ffn: int = 0  # channels of the expert that every token passes through
    delta_nets: DeltaNets | None = None  # a Qwen3.5: every fourth layer has softmax attention
    vision_layers: int = 0  # of a Qwen3.5's image part, which text rows do not use
    vision: tuple[str, dict[str, Any]] | None = None  # model_type and vision_config of those whose rows have an image
    audio: dict[str, Any] | None = None  # audio_config of a Qwen3-Omni
    image_side: int = 0  # pixels of the square image in each row
    audio_seconds: int = 0  # of the recording in every other row

    @property
    def model_type(self) -> str:
        if self.vision is not None:
            return self.vision[0]
        if self.delta_nets is not None:
            return "qwen3_5_moe" if self.experts else "qwen3_5"
        return "qwen3_moe" if self.experts else "qwen3"

    @property
    def template(self) -> str:
        """Return ms-swift's name of the chat template."""
        return self.model_type.removesuffix("_moe")

    @property
    def image_tokens(self) -> int:
        """Tokens of the image of a row, with the two around it."""
        if self.vision is None or not self.image_side:
            return 0
        return (self.image_side // (2 * int(self.vision[1]["patch_size"]))) ** 2 + 2

    def media_tokens(self, row: int) -> int:
        """Return the tokens of a row's image and recording, with the two around each."""
        has_audio = self.audio_seconds and row % 2
        return self.image_tokens + (_AUDIO_TOKENS * self.audio_seconds + 2 if has_audio else 0)


_AUDIO_TOKENS = 13  # of a Qwen3-Omni in a second
_QWEN2_5_VL = {
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "patch_size": 14,
    "window_size": 112,
}
_QWEN3_VL = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 16}
_QWEN3_30B_A3B = Shape(
    layers=48,
    hidden=2048,
    ffn=768,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocabulary=151936,
    tied=False,
    experts=128,
    experts_per_token=8,
)
_TOY_QWEN3_5 = Shape(
    layers=4,
    hidden=64,
    ffn=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=512,
    vision_layers=2,
    delta_nets=DeltaNets(
        layers=3, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32
    ),
)
# The thinker of Qwen3-Omni-30B-A3B; the talker and the vocoder are not trained, and are tiny here.
_QWEN3_OMNI = replace(
    _QWEN3_30B_A3B,
    vocabulary=152064,
    image_side=768,
    vision=(
        "qwen3_omni_moe",
        {
            **_QWEN3_VL,
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    audio={
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "downsample_hidden_size": 480,
    },
)
_TOY_QWEN3_OMNI = Shape(
    layers=4,
    hidden=128,
    ffn=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=512,
    tied=False,
    experts=8,
    experts_per_token=2,
    image_side=64,
    vision=(
        "qwen3_omni_moe",
        {
            **_QWEN3_VL,
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    audio={
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 64,
        "downsample_hidden_size": 8,
    },
)
SHAPES = {
    "toy-qwen3-vl": Shape(
        layers=4,
        hidden=128,
        ffn=256,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocabulary=512,
        image_side=64,
        vision=(
            "qwen3_vl",
            {
                **_QWEN3_VL,
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        ),
    ),
    "toy-qwen2.5-vl": Shape(
        layers=4,
        hidden=128,
        ffn=256,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocabulary=512,
        image_side=56,
        vision=(
            "qwen2_5_vl",
            {
                **_QWEN2_5_VL,
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "fullatt_block_indexes": [1],
            },
        ),
    ),
    "3b-qwen2.5-vl": Shape(
        layers=36,
        hidden=2048,
        ffn=11008,
        heads=16,
        kv_heads=2,
        head_dim=128,
        vocabulary=151936,
        image_side=756,
        vision=(
            "qwen2_5_vl",
            {
                **_QWEN2_5_VL,
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        ),
    ),
    "2b-qwen3-vl": Shape(
        layers=28,
        hidden=2048,
        ffn=6144,
        heads=16,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
        image_side=768,
        vision=(
            "qwen3_vl",
            {
                **_QWEN3_VL,
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [5, 11, 17],
            },
        ),
    ),
    "toy": Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=32, vocabulary=512),
    "tiny": Shape(layers=2, hidden=256, ffn=768, heads=4, kv_heads=2, head_dim=64, vocabulary=32768),
    "0.6b": Shape(layers=28, hidden=1024, ffn=3072, heads=16, kv_heads=8, head_dim=128, vocabulary=151936),
    "1.7b": Shape(layers=28, hidden=2048, ffn=6144, heads=16, kv_heads=8, head_dim=128, vocabulary=151936),
    "toy-qwen3.5": _TOY_QWEN3_5,
    "2b-qwen3.5": Shape(
        layers=24,
        hidden=2048,
        ffn=6144,
        heads=8,
        kv_heads=2,
        head_dim=256,
        vocabulary=248320,
        vision_layers=24,
        delta_nets=DeltaNets(
            layers=18,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    ),
    "toy-qwen3-moe": Shape(
        layers=2,
        hidden=64,
        ffn=32,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocabulary=512,
        tied=False,
        experts=8,
        experts_per_token=2,
    ),
    "toy-qwen3.5-moe": replace(_TOY_QWEN3_5, ffn=32, tied=False, experts=8, experts_per_token=2, shared_ffn=32),
    # Qwen3.5-35B-A3B
    "35b-qwen3.5-moe": Shape(
        layers=40,
        hidden=2048,
        ffn=512,
        heads=16,
        kv_heads=2,
        head_dim=256,
        vocabulary=248320,
        tied=False,
        experts=256,
        experts_per_token=8,
        shared_ffn=512,
        vision_layers=27,
        delta_nets=DeltaNets(
            layers=30,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    ),
    "30b-qwen3-moe": _QWEN3_30B_A3B,
    "30b-qwen3-omni": _QWEN3_OMNI,
    "toy-qwen3-omni": _TOY_QWEN3_OMNI,
    "30b-qwen3-omni-audio": replace(_QWEN3_OMNI, image_side=0, audio_seconds=8),
    "toy-qwen3-omni-audio": replace(_TOY_QWEN3_OMNI, image_side=0, audio_seconds=1),
    # A quarter of the layers and half of the experts of Qwen3-30B-A3B.
    "4.5b-qwen3-moe": replace(_QWEN3_30B_A3B, layers=12, experts=64),
    "14b": Shape(layers=40, hidden=5120, ffn=17408, heads=40, kv_heads=8, head_dim=128, vocabulary=151936, tied=False),
    "8b": Shape(layers=36, hidden=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocabulary=151936, tied=False),
    "4b": Shape(layers=36, hidden=2560, ffn=9728, heads=32, kv_heads=8, head_dim=128, vocabulary=151936),
}

"""A mixture of experts that transformers has saved again is refused; the released one and other models are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from swift_megatron_grpo.arguments.models import check_stacked_experts
from swift_megatron_grpo.cli.tiny_models import TINY, Shape, save_composite


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_that_save_pretrained_has_left_transposed_are_refused(kind: str, tmp_path: Path) -> None:
    released, again = tmp_path / "released", tmp_path / "again"
    save_composite(released, Shape(kind, TINY))
    AutoModelForImageTextToText.from_pretrained(released, dtype=torch.bfloat16).save_pretrained(again)
    config = json.loads((again / "config.json").read_text())
    check_stacked_experts("m", released, config)
    if kind == "qwen3_5_moe":  # released as transformers has them in memory
        check_stacked_experts("m", again, config)
        return
    with pytest.raises(ValueError, match=r"experts\.\w+ is \[4, .*transpose experts back.*use the released"):
        check_stacked_experts("m", again, config)

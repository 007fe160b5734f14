"""Tokens of images, as vLLM counts them: by the trainer's reader, which lays prompts out without decoding an image."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from swift.model import get_processor
from swift.template import get_template

from swift_megatron_grpo.cli.check_layouts.layouts import template_for_images
from swift_megatron_grpo.cli.tiny_models import TINY, Shape, save_composite
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.generation.vllm.images import tokens_of_image


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "glm4v", "internvl"])
def test_an_image_has_the_tokens_that_the_trainer_expects(tmp_path: Path, kind: str) -> None:
    save_composite(tmp_path, Shape(kind, TINY))
    template = get_template(get_processor(str(tmp_path), model_type=kind), template_type=template_for_images(kind))
    reader, rng = ImageReader(template), random.Random(0)
    template.set_mode("vllm")
    for _ in range(8):
        image = Image.new("RGB", (rng.randint(20, 300), rng.randint(20, 300)))
        row: dict[str, Any] = {"messages": [{"role": "user", "content": "<image>"}], "images": [image]}
        inputs = template.encode(row)
        [sent] = inputs["images"]
        resizes = inputs.get("mm_processor_kwargs", {}).get("do_resize", True)
        [image] = reader.images(row)
        counted = tokens_of_image(template.processor, sent.width, sent.height, resizes)
        assert counted == len(reader.expand([reader.format.placeholder], [image]))

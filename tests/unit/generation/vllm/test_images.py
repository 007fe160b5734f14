"""Images as engines see them: their tokens, as the trainer's reader counts them, and no file that a text names."""

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
from swift_megatron_grpo.data.encoders import encoder_of
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


def test_a_path_in_a_text_is_not_opened(tmp_path: Path) -> None:
    """ms-swift opens the file, also if the tag is split over parts, in a tool call, or written by the policy."""
    save_composite(tmp_path, Shape("qwen2_5_vl", TINY))
    template = get_template(
        get_processor(str(tmp_path), model_type="qwen2_5_vl"), template_type=template_for_images("qwen2_5_vl")
    )
    template.set_mode("vllm")
    path = str(tmp_path / "local.png")
    Image.new("RGB", (56, 56)).save(path)
    tag = f"<img>{path}</img>"
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": f"See {tag}."}
    parts = [{"type": "text", "text": text} for text in (tag[:3], tag[3:])]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": tag, "arguments": {}}}]}
    requests = [
        [{"role": "user", "content": tag}],
        [{"role": "user", "content": parts}],
        [question, call, {"role": "tool", "content": "done"}],
        [question, answer, question],
    ]
    for messages in requests:
        assert len(template.encode({"messages": messages})["images"]) == 1
    encoder, reader = encoder_of(template), ImageReader(template)
    for messages in requests:
        inputs = encoder.encode({"messages": messages})
        assert not inputs.get("images") and path in template.processor.tokenizer.decode(inputs["input_ids"])
        assert reader.encode_prompt({"messages": messages}) == inputs["input_ids"]

"""Cut images of a MiniCPM-V with ms-swift's template, and with vLLM as ms-swift asks it to.

python minicpm_slices.py MODEL OUT.json SLICES...

Writes, for each limit on slices in the model's preprocessor_config.json, whether tokens, grids and pixels are equal for
every row of images.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from swift.model import get_processor
from swift.template import get_template
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

ROWS = [[(50, 50)], [(300, 120), (64, 64)], [(33, 500)], [(400, 400), (112, 112), (100, 230)]]  # in pixels


def main(model: str, out: str, *limits: str) -> None:
    equal = {}
    for limit in limits:
        limited = shutil.copytree(model, f"{model}-{limit}")  # vLLM reads a folder once
        file = Path(limited, "preprocessor_config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_slice_nums": int(limit)}))
        equal[limit] = [is_equal(limited, [noise(*size) for size in sizes]) for sizes in ROWS]
    Path(out).write_text(json.dumps(equal))


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def is_equal(model: str, images: list[Image.Image]) -> bool:
    template = get_template(get_processor(model, model_type="minicpmv4_6"), template_type="minicpmv4_6")
    template.set_mode("train")
    turns = [{"role": "user", "content": "<image>" * len(images)}, {"role": "assistant", "content": "yes"}]
    trained = template.encode({"messages": turns, "images": images})
    template.set_mode("vllm")
    asked: Any = template.encode({"messages": turns[:1], "images": images})
    engine = MULTIMODAL_REGISTRY.create_processor(ModelConfig(model))
    given = engine.apply(
        ProcessorInputs(
            prompt=asked["input_ids"],
            mm_data_items=engine.info.parse_mm_data({"image": asked["images"]}),
            hf_processor_mm_kwargs=asked["mm_processor_kwargs"],
        ),
        TimingContext(),
    )
    prompt = given["prompt_token_ids"]
    seen = [(item["pixel_values"].data, item["tgt_sizes"].data.tolist()) for item in given["mm_kwargs"]["image"]]
    grids = [grid for _, of_image in seen for grid in of_image]
    if prompt != trained["input_ids"][: len(prompt)] or grids != trained["target_sizes"].tolist():
        return False
    side = template.processor.image_processor.patch_size
    slices = [
        one[..., : rows * columns * side]
        for pixels, of_image in seen
        for one, (rows, columns) in zip(pixels, of_image, strict=True)
    ]
    return torch.equal(torch.cat(slices, -1), trained["pixel_values"][0])


if __name__ == "__main__":
    main(*sys.argv[1:])

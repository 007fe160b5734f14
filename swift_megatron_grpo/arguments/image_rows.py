"""The images of the datasets: counted and checked before a model loads, on all ranks together."""

from __future__ import annotations

from typing import Any

from swift.template import Template

from swift_megatron_grpo.arguments.rows_on_ranks import on_all_ranks
from swift_megatron_grpo.data.image_checks import ImagesOfRow, check_row
from swift_megatron_grpo.data.image_reader import ImageReader


def read_images(dataset: Any, template: Template, takes_images: bool) -> list[ImagesOfRow]:
    """Return what every row has. Every rank calls this, and opens its share of the images."""
    if not takes_images or "images" not in dataset.column_names:
        return [ImagesOfRow(0)] * len(dataset)
    reader = ImageReader(template)
    written = [template.processor.image_token, template.processor.video_token]
    return on_all_ranks(lambda row: check_row(dataset[row], reader, written), len(dataset))

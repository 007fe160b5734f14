"""docs/choosing_settings.md has the settings that the memory plan finds today."""

from __future__ import annotations

from scripts.write_settings_page import GPUS, KINDS, MODELS, PAGE, best_that_fits, read_shapes, table
from swift_megatron_grpo.runtime.gpus import find_gpu


def test_the_page_has_the_settings_of_the_dense_model() -> None:
    """The table of one model, which takes 5 s; the others come from the same functions."""
    page = PAGE.read_text()
    assert all(line in page for line in table(["Qwen3-8B"]).splitlines()), "run scripts/fix"
    assert all(name in page for name in MODELS), "run scripts/fix"


def test_more_memory_needs_no_more_parallelism() -> None:
    shapes = read_shapes("Qwen3-8B")
    small, large = (best_that_fits(shapes, GPUS[1], lora=False, gpu=find_gpu(kind))[0] for kind in KINDS)
    assert "--pipeline_model_parallel_size 2" in small and "parallel_size" not in large

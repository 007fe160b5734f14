"""Write the tables of docs/memory.md: what each flag does to the memory of a GPU, by the plan of `--check true`.

    python -m scripts.write_memory_page

tests/unit/docs compares the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scripts.write_settings_page import Shapes, engine_of, read_shapes
from swift_megatron_grpo.cli.estimate.activations import MediaTokens, Recompute, Tokens
from swift_megatron_grpo.cli.estimate.memory import PHASES, Engine, Training, plan_memory, with_budget
from swift_megatron_grpo.runtime.gpus import find_gpu
from swift_megatron_grpo.settings.layout import Layout

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN = "<!-- memory, by scripts/write_memory_page.py -->\n"
END = "<!-- end of memory -->\n"
BEGIN_IMAGES = "<!-- memory of images, by scripts/write_memory_page.py -->\n"
END_IMAGES = "<!-- end of memory of images -->\n"
MODEL, GPU, GPUS, BUDGET = "Qwen3-8B", "H200-141G", 8, 16384
PROMPT, COMPLETION = 1024, 4096  # tokens: a fifth of a micro batch is prompts
COLUMNS = ("states", "activations", "logits", "vLLM", *PHASES)
# The workload of benchmarks/h200/qwen2.5-vl-3b.json: 15 completions in a micro batch, of 3 prompts.
MODEL_OF_IMAGES, IMAGE = "Qwen2.5-VL-3B", 729  # tokens
SAMPLE, TRAINED, SAMPLES, SHOWN, PROMPTS = 1052, 256, 15, 3, 16
COLUMNS_OF_IMAGES = ("states", "activations", "logits", "train")


def base(shapes: Shapes) -> tuple[Training, Engine]:
    """Return all weights trained by data-parallel ranks, and vLLM with 0.4 of each GPU."""
    tokens = Tokens(BUDGET, BUDGET, BUDGET * COMPLETION // (PROMPT + COMPLETION))
    return Training(Layout(GPUS), tokens, micro_batches=20), engine_of(shapes, 1, 0.4)


def runs(shapes: Shapes) -> Iterator[tuple[str, Training, Engine]]:
    """Yield one change at a time, as flags."""
    training, engine = base(shapes)
    full = Recompute("full", "uniform", 1)
    yield "none of the below", training, engine
    yield "`--max_tokens_per_micro_batch 8192`", with_budget(training, 8192), engine
    yield "`--recompute_elementwise true`", replace(training, recompute=Recompute(elementwise=True)), engine
    yield (
        "`--recompute_granularity full --recompute_method uniform --recompute_num_layers 1`",
        replace(training, recompute=full),
        engine,
    )
    tensor = replace(training.layout, tensor_model_parallel_size=2, sequence_parallel=True)
    yield "`--tensor_model_parallel_size 2 --sequence_parallel true`", replace(training, layout=tensor), engine
    pipeline = replace(training.layout, pipeline_model_parallel_size=2)
    yield "`--pipeline_model_parallel_size 2`", replace(training, layout=pipeline), engine
    yield "`--optimizer_cpu_offload true`", replace(training, optimizer_on_cpu=1.0), engine
    yield "`--vllm_gpu_memory_utilization 0.3`", training, engine_of(shapes, 1, 0.3)
    offloads = dict.fromkeys(("offload_model", "offload_optimizer", "offload_grad"), True)
    for name in offloads:
        yield f"`--{name} true`", replace(training, **{name: True}), engine  # type: ignore[arg-type]
    yield (
        f"`{' '.join(f'--{name} true' for name in offloads)}`",
        replace(training, **offloads),  # type: ignore[arg-type]
        engine,
    )
    yield "`--sleep_level 0`", training, replace(engine, sleep_level=0)
    yield "`--beta 0.04`", replace(training, frozen_reference=True), engine
    yield (
        "`--tuner_type lora --lora_rank 16 --target_modules all-linear`",
        replace(training, lora_rank=16),
        engine,
    )


def row(shapes: Shapes, flags: str, training: Training, engine: Engine) -> str:
    """Return a row in GB, with the largest value of the pipeline stages in each column."""
    ranks = plan_memory(shapes.tensors, shapes.decoder, training, engine, find_gpu(GPU).memory_bytes)
    values = [(rank.states, rank.activations, rank.in_backward, rank.vllm, *rank.phases.values()) for rank in ranks]
    return f"| {flags} | {' | '.join(f'{max(column) / 1e9:.0f}' for column in zip(*values, strict=True))} |"


def table() -> str:
    """Return the table of all runs."""
    shapes = read_shapes(MODEL)
    head = f"| flags | {' | '.join(COLUMNS)} |\n| --- |{' --- |' * len(COLUMNS)}\n"
    return head + "".join(f"{row(shapes, *run)}\n" for run in runs(shapes))


def runs_with_images() -> Iterator[tuple[str, Training]]:
    """Yield the parts that are trained, as flags."""
    tokens = Tokens(SAMPLES * SAMPLE, SAMPLES * SAMPLE, SAMPLES * TRAINED)
    images = MediaTokens(shown=SAMPLES * IMAGE, distinct=SHOWN * IMAGE, of_rollout=PROMPTS * IMAGE)
    frozen = Training(Layout(1), tokens, micro_batches=9, images=images)
    yield "none of the below: the image part is frozen", frozen
    yield "`--freeze_aligner false`", replace(frozen, trains_aligner=True)
    whole = replace(frozen, trains_aligner=True, trains_vision_tower=True)
    flags = "--freeze_vit false --freeze_aligner false"
    yield f"`{flags}`", whole
    yield f"`{flags} --vit_gradient_checkpointing false`", replace(whole, vision_tower_checkpointing=False)
    yield f"`{flags} --freeze_llm true`", replace(whole, trains_language=False)
    lora = "--tuner_type lora --lora_rank 16 --target_modules all-linear"
    yield f"`{lora}`", replace(frozen, lora_rank=16)
    yield f"`{lora} {flags}`", replace(whole, lora_rank=16)


def row_of_images(shapes: Shapes, flags: str, training: Training) -> str:
    """Return a row in GB, with a decimal: the differences are small."""
    [rank] = plan_memory(
        shapes.tensors, shapes.decoder, training, None, find_gpu(GPU).memory_bytes, shapes.vision_tower
    )
    values = (rank.states, rank.activations, rank.in_backward, rank.phases["train"])
    return f"| {flags} | {' | '.join(f'{value / 1e9:.1f}' for value in values)} |"


def table_of_images() -> str:
    """Return the table of all parts of a model that takes images."""
    shapes = read_shapes(MODEL_OF_IMAGES)
    head = f"| flags | {' | '.join(COLUMNS_OF_IMAGES)} |\n| --- |{' --- |' * len(COLUMNS_OF_IMAGES)}\n"
    return head + "".join(f"{row_of_images(shapes, *run)}\n" for run in runs_with_images())


def with_table(page: str) -> str:
    for begin, end, text in ((BEGIN, END, table()), (BEGIN_IMAGES, END_IMAGES, table_of_images())):
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

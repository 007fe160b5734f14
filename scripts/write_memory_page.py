"""Write the table of docs/memory.md: what each flag does to the memory of a GPU, by the plan of `--check true`.

    python -m scripts.write_memory_page

tests/unit/docs compares the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scripts.write_settings_page import Shapes, read_shapes
from swift_megatron_grpo.layout import Layout
from swift_megatron_grpo.planning.activations import Recompute, Tokens
from swift_megatron_grpo.planning.gpus import find_gpu
from swift_megatron_grpo.planning.memory import Training, Vllm, plan_memory, with_budget

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN = "<!-- memory, by scripts/write_memory_page.py -->\n"
END = "<!-- end of memory -->\n"
MODEL, GPU, GPUS, BUDGET = "Qwen3-8B", "H200-141G", 8, 16384
PROMPT, COMPLETION = 1024, 4096  # tokens: a fifth of a micro batch is prompts
COLUMNS = ("states", "activations", "logits", "vLLM", "generation", "train")


def base() -> tuple[Training, Vllm]:
    """Return all weights trained by data-parallel ranks, and vLLM with 0.4 of each GPU."""
    tokens = Tokens(BUDGET, BUDGET, BUDGET * COMPLETION // (PROMPT + COMPLETION))
    return Training(Layout(GPUS), tokens, micro_batches=20), Vllm(0.4, sleep_level=2)


def runs() -> Iterator[tuple[str, Training, Vllm]]:
    """Yield one change at a time, as flags."""
    training, vllm = base()
    full = Recompute("full", "uniform", 1)
    yield "none of the below", training, vllm
    yield "`--max_tokens_per_micro_batch 8192`", with_budget(training, 8192), vllm
    yield "`--recompute_elementwise true`", replace(training, recompute=Recompute(elementwise=True)), vllm
    yield (
        "`--recompute_granularity full --recompute_method uniform --recompute_num_layers 1`",
        replace(training, recompute=full),
        vllm,
    )
    tensor = replace(training.layout, tensor_model_parallel_size=2, sequence_parallel=True)
    yield "`--tensor_model_parallel_size 2 --sequence_parallel true`", replace(training, layout=tensor), vllm
    pipeline = replace(training.layout, pipeline_model_parallel_size=2)
    yield "`--pipeline_model_parallel_size 2`", replace(training, layout=pipeline), vllm
    yield "`--optimizer_cpu_offload true`", replace(training, optimizer_on_cpu=1.0), vllm
    yield "`--vllm_gpu_memory_utilization 0.3`", training, replace(vllm, utilization=0.3)
    offloads = dict.fromkeys(("offload_model", "offload_optimizer", "offload_grad"), True)
    for name in offloads:
        yield f"`--{name} true`", replace(training, **{name: True}), vllm  # type: ignore[arg-type]
    yield (
        f"`{' '.join(f'--{name} true' for name in offloads)}`",
        replace(training, **offloads),  # type: ignore[arg-type]
        vllm,
    )
    yield "`--sleep_level 0`", training, replace(vllm, sleep_level=0)
    yield "`--beta 0.04`", replace(training, frozen_reference=True), vllm
    yield (
        "`--tuner_type lora --lora_rank 16 --target_modules all-linear`",
        replace(training, lora_rank=16),
        vllm,
    )


def row(shapes: Shapes, flags: str, training: Training, vllm: Vllm) -> str:
    """Return a row in GB, with the largest value of the pipeline stages in each column."""
    ranks = plan_memory(shapes.tensors, shapes.decoder, training, vllm, find_gpu(GPU).memory_bytes)
    values = [(rank.states, rank.activations, rank.in_backward, rank.vllm, *rank.phases.values()) for rank in ranks]
    return f"| {flags} | {' | '.join(f'{max(column) / 1e9:.0f}' for column in zip(*values, strict=True))} |"


def table() -> str:
    """Return the table of all runs."""
    shapes = read_shapes(MODEL)
    head = f"| flags | {' | '.join(COLUMNS)} |\n| --- |{' --- |' * len(COLUMNS)}\n"
    return head + "".join(f"{row(shapes, *run)}\n" for run in runs())


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

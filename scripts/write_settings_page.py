"""Write the tables of docs/choosing_settings.md: settings that fit, by model and number of GPUs.

    python scripts/write_settings_page.py

The memory plan of `--check true` decides what fits; tests/unit/scripts compares the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from swift_megatron_grpo.cli.check.model import cached_channels, decoder_of, flops_of, vision_tower_of
from swift_megatron_grpo.cli.estimate.activations import Decoder, MediaTokens, Recompute, Tokens, VisionTower
from swift_megatron_grpo.cli.estimate.advice import MARGIN
from swift_megatron_grpo.cli.estimate.memory import Engine, Training, plan_memory
from swift_megatron_grpo.cli.estimate.parameters import Tensor, tensors_of
from swift_megatron_grpo.cli.estimate.throughput import PassCounts, StepWork, seconds_of_training, work_of
from swift_megatron_grpo.runtime.gpus import Gpu, find_gpu
from swift_megatron_grpo.settings.layout import Layout

PAGE = Path(__file__).parents[1] / "docs" / "choosing_settings.md"
BEGIN = "<!-- settings, by scripts/write_settings_page.py -->\n"
END = "<!-- end of settings -->\n"
PROMPT, COMPLETION, COMPLETIONS, GROUP = 1024, 4096, 512, 8  # tokens, tokens, of a step, of a prompt
GPUS, KINDS = (1, 8, 16, 64), ("H100-80G", "H200-141G")
# Settings that fit are ordered by the guessed time of the train phase, and factors for what the guess leaves out.
SMALL_BUDGET, OFFLOADED, ON_CPU, ENGINE_RANKS = 1.04, 1.02, 1.3, 1.03
EQUAL = 1.05  # times that differ by less count as equal

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": (
        "qwen3",
        dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
             num_key_value_heads=8, head_dim=128, vocab_size=151936),
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
             num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
             vocab_size=151936),
    ),
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
             num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
             rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}),
    ),
}  # fmt: skip
VISIONS = {
    "Qwen2.5-VL-3B": dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=2048),
}


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model."""

    tensors: list[Tensor]
    decoder: Decoder
    work: StepWork
    cached: int
    key_heads: int
    vision_tower: VisionTower | None


@dataclass(frozen=True)
class Choice:
    """Settings, and their flags."""

    training: Training
    engine: Engine
    flags: list[str]
    seconds: float


def read_shapes(name: str) -> Shapes:
    model_type, text = MODELS[name]
    sees_images = name in VISIONS
    values = {"text_config": text, "vision_config": VISIONS[name]} if sees_images else text
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if sees_images else AutoModelForCausalLM).from_config(config)
    tensors = tensors_of({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    values = (config.text_config if sees_images else config).to_dict()
    tower = vision_tower_of(model_type, VISIONS[name], text["hidden_size"]) if sees_images else None
    decoder = decoder_of(values, bool(text.get("tie_word_embeddings", False)), tensors)
    work = work_of([(PROMPT + COMPLETION, COMPLETION)] * COMPLETIONS, flops_of(values, decoder))
    cached = cached_channels(values, decoder)
    return Shapes(tensors, decoder, work, cached, values["num_key_value_heads"], tower)


def choices(shapes: Shapes, gpus: int, lora: bool, gpu: Gpu) -> Iterator[Choice]:
    """Yield settings in the order of their guessed time."""
    experts = [1] if not shapes.decoder.expert_layers else [1, 2, 4, 8]
    found = [
        choice
        for tensor, pipeline, expert, ranks in product((1, 2, 4, 8), (1, 2, 4), experts, (1, 2, 4))
        for budget, switches in product((32768, 16384, 8192), product((False, True), repeat=3))
        if (choice := _choice(shapes, gpus, lora, gpu, tensor, pipeline, expert, ranks, budget, *switches))
    ]
    yield from sorted(found, key=lambda choice: choice.seconds)


def _choice(shapes: Shapes, gpus: int, lora: bool, gpu: Gpu, tensor: int, pipeline: int, expert: int, ranks: int,
            budget: int, recompute: bool, offload: bool, on_cpu: bool) -> Choice | None:  # fmt: skip
    allowed = (
        gpus % (tensor * pipeline) == 0
        and gpus % (expert * pipeline) == 0
        and gpus % ranks == 0
        and tensor <= shapes.key_heads * 2
        and tensor * pipeline <= 8
        and not (lora and (on_cpu or offload))
    )
    if not allowed:
        return None
    layout = Layout(
        gpus,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        sequence_parallel=tensor > 1,
        vllm_tensor_parallel_size=ranks,
    )
    steps = max(1, COMPLETIONS // layout.data_parallel * (PROMPT + COMPLETION) // budget)
    training = Training(
        layout,
        Tokens(budget, budget, budget * COMPLETION // (PROMPT + COMPLETION)),
        steps,
        Recompute("full", "uniform", 1) if recompute else Recompute(),
        lora_rank=16 if lora else None,
        images=_image_tokens(layout, budget) if shapes.vision_tower else MediaTokens(),
        optimizer_on_cpu=1.0 if on_cpu else 0.0,
        offload_model=offload,
        offload_optimizer=offload,
        offload_grad=offload,
    )
    flags = [f"--max_tokens_per_micro_batch {budget}"]
    flags += [f"--tensor_model_parallel_size {tensor} --sequence_parallel true"] if tensor > 1 else []
    flags += [f"--pipeline_model_parallel_size {pipeline}"] if pipeline > 1 else []
    flags += [f"--expert_model_parallel_size {expert}"] if expert > 1 else []
    flags += ["--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"] if recompute else []
    flags += ["--offload_model true --offload_optimizer true --offload_grad true"] if offload else []
    flags += ["--optimizer_cpu_offload true"] if on_cpu else []
    flags += [f"--vllm_tensor_parallel_size {ranks}"] if ranks > 1 else []
    seconds = seconds_of_training(shapes.work, gpu, shapes.decoder, layout, steps, PassCounts(lora, recompute), item=2)
    seconds *= (OFFLOADED if offload else 1) * (ON_CPU if on_cpu else 1) * ENGINE_RANKS ** (ranks.bit_length() - 1)
    seconds *= SMALL_BUDGET ** {32768: 0, 16384: 0.5, 8192: 1}[budget]
    return Choice(training, engine_of(shapes, ranks, 0.5), flags, seconds)


def engine_of(shapes: Shapes, ranks: int, utilization: float) -> Engine:
    """Return vLLM in bf16."""
    weights = 2.0 * sum(tensor.size for tensor in shapes.tensors)
    return Engine(weights, 2 * shapes.cached, shapes.key_heads, PROMPT + COMPLETION, ranks, utilization)


def _image_tokens(layout: Layout, budget: int) -> MediaTokens:
    """Return images of prompts that are images alone."""
    shown = budget * PROMPT // (PROMPT + COMPLETION)
    return MediaTokens(shown, shown, max(1, COMPLETIONS // GROUP // layout.data_parallel) * PROMPT)


def best_that_fits(shapes: Shapes, gpus: int, lora: bool, gpu: Gpu) -> tuple[str, int]:
    """Return flags and peak of the settings with the fewest flags among the fastest that fit."""
    found: list[tuple[Choice, str, float]] = []
    for choice in choices(shapes, gpus, lora, gpu):
        if found and choice.seconds > EQUAL * found[0][0].seconds:
            break
        if fitting := _largest_share(shapes, choice, gpu):
            found.append((choice, *fitting))
    if not found:
        return "none fits", 0
    choice, share, peak = min(found, key=lambda one: len(one[0].flags))  # the first, which is the fastest of these
    flags = " ".join([*choice.flags, share]).removeprefix("--").split(" --")
    return " ".join(f"`--{flag}`" for flag in flags), round(peak / 1e9)  # a page breaks lines between them


def _largest_share(shapes: Shapes, choice: Choice, gpu: Gpu) -> tuple[str, float] | None:
    """Return the largest share of vLLM with which settings fit, as a flag, and their peak."""
    for share in (0.6, 0.4, 0.3):
        engine = replace(choice.engine, utilization=share)
        if not engine.fits(gpu.memory_bytes) or engine.sequences(gpu.memory_bytes, PROMPT + COMPLETION) < 8:
            continue
        ranks = plan_memory(
            shapes.tensors, shapes.decoder, choice.training, engine, gpu.memory_bytes, shapes.vision_tower
        )
        peak = max(rank.peak for rank in ranks)
        if peak <= gpu.memory_bytes * (1 - MARGIN):
            return f"--vllm_gpu_memory_utilization {share}", peak
    return None


def table(models: Iterable[str] = MODELS) -> str:
    """Return the table; numbers of GPUs with the same settings share a row, with the largest of their peaks."""
    rows = ["| model | trained | GPU | number | flags | peak GB |", "| --- | --- | --- | --- | --- | --- |"]
    for name in models:
        shapes = read_shapes(name)
        for lora, kind in product((False, True), KINDS):
            numbers: dict[str, list[int]] = {}
            peaks: dict[str, int] = {}
            for gpus in GPUS:
                flags, peak = best_that_fits(shapes, gpus, lora, find_gpu(kind))
                numbers.setdefault(flags, []).append(gpus)
                peaks[flags] = max(peak, peaks.get(flags, 0))
            trained = "LoRA 16" if lora else "all weights"
            rows += [
                f"| {name} | {trained} | {kind} | {', '.join(map(str, gpus))} | {flags} | {peaks[flags] or ''} |"
                for flags, gpus in numbers.items()
            ]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

"""The memory plan of `--check true` for a measured process of this package, from its result file alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from swift_megatron_grpo.cli.check.micro_batches import Sample, media_tokens_of, micro_batches
from swift_megatron_grpo.cli.check.model import Model, read_model
from swift_megatron_grpo.cli.estimate.activations import MediaTokens, Recompute, Tokens
from swift_megatron_grpo.cli.estimate.memory import Engine, RankMemory, Training, master_bytes, plan_memory
from swift_megatron_grpo.cli.tiny_omni import NAMED_TOKENS
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.runtime.gpus import find_gpu
from swift_megatron_grpo.settings.batches import BatchSizes, MicroBatches
from swift_megatron_grpo.settings.layout import Layout

from .models import qwen3_5_config, qwen3_config, qwen3_omni_config, qwen_vl_config, text_sizes
from .results import SHARED, Process, Run
from .shapes import SHAPES
from .workload import Workload

_BYTES = {"fp32": 4, "bf16": 2}  # of a moment


@dataclass(frozen=True)
class Planned:
    """A step of a measured process, as `--check true` plans it."""

    model: Model
    batch: BatchSizes
    samples: list[Sample]
    plan: StepPlan
    largest: Tokens  # micro batch
    training: Training

    def memory(self, device: str) -> list[RankMemory]:
        """Return the memory of the trainer on each pipeline rank, without vLLM."""
        return self._memory(device, None)

    def memory_beside_vllm(self, device: str) -> list[RankMemory]:
        """Return the same with a vLLM that sleeps in the train phase. What it has while awake is not planned."""
        return self._memory(device, Engine(0, 0, 1, 0, ranks=1, utilization=1.0))

    def _memory(self, device: str, engine: Engine | None) -> list[RankMemory]:
        model = self.model
        return plan_memory(
            model.tensors, model.decoder, self.training, engine, find_gpu(device).memory_bytes, model.vision_tower
        )


def planned(run: Run, process: Process) -> Planned:
    """Plan the step of a process. Its shape is a Qwen3, a Qwen3-MoE, a Qwen3.5 or a Qwen-VL."""
    flags, model = process.flags + run.flags, model_of(run.workload["shape"])
    batch, samples = _batch(run, flags), _samples(run)
    budget = flag(flags, "max_tokens_per_micro_batch")
    packing = MicroBatches(
        micro_batch_size=batch.micro_batch_size,
        max_tokens_per_micro_batch=None if budget is None else int(budget),
        share_prompts="true" if SHARED in process.setting else "false",
        context_parallel_size=1,
        attention_backend="flash",
    )
    plan, largest = micro_batches(batch, packing, model, samples)
    training = Training(
        batch.layout,
        largest,
        plan.num_micro_batches,
        _recompute(process.setting),
        lora_rank=_number(flags, "lora_rank", 8) if flag(flags, "tuner_type") == "lora" else None,
        optimizer_bytes=_optimizer_bytes(flags),
        images=_image_tokens(run, plan, batch),
    )
    return Planned(model, batch, samples, plan, largest, training)


@cache
def model_of(name: str) -> Model:
    """Return the sizes of a shape, read from a config.json as a run reads them."""
    shape = SHAPES[name]
    text = text_sizes(None, shape)
    if shape.delta_nets is not None:
        config = qwen3_5_config(shape, shape.delta_nets, text, {})
    elif shape.audio is not None:
        config = qwen3_omni_config(shape, text, dict.fromkeys((*NAMED_TOKENS[shape.model_type], "im_end"), 0))
    elif shape.vision is not None:
        config = qwen_vl_config(shape, shape.vision[1], text, {})
    else:
        config = qwen3_config(shape, text)
    with TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        return read_model(folder)


def flag(flags: Sequence[str], name: str) -> str | None:
    return flags[flags.index(f"--{name}") + 1] if f"--{name}" in flags else None


def _number(flags: Sequence[str], name: str, default: int) -> int:
    return int(flag(flags, name) or default)


def _optimizer_bytes(flags: Sequence[str]) -> int:
    moments = sum(_BYTES[flag(flags, name) or "fp32"] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    return moments + master_bytes(4, flag(flags, "use_precision_aware_optimizer") == "true", bf16=True)


def _recompute(setting: str) -> Recompute:
    if "recompute" in setting:
        return Recompute("full", "uniform", 1)
    return Recompute(elementwise="elementwise" in setting)


def _batch(run: Run, flags: Sequence[str]) -> BatchSizes:
    layout = Layout(
        run.ranks,
        tensor_model_parallel_size=_number(flags, "tensor_model_parallel_size", 1),
        pipeline_model_parallel_size=_number(flags, "pipeline_model_parallel_size", 1),
        context_parallel_size=_number(flags, "context_parallel_size", 1),
        expert_model_parallel_size=_number(flags, "expert_model_parallel_size", 1),
        expert_tensor_parallel_size=_number(flags, "expert_tensor_parallel_size", 1),
        sequence_parallel=flag(flags, "sequence_parallel") == "true",
        last_stage_layers=_number(flags, "decoder_last_pipeline_num_layers", 0) or None,
    )
    workload = Workload(**run.workload)
    size = _number(flags, "micro_batch_size", 1)
    return BatchSizes(layout, size, workload.completions, workload.completions, 1, workload.generations)


def _samples(run: Run) -> list[Sample]:
    """Return the samples of a step. Texts with media all have the same length, which the file has in sum."""
    workload, shape = Workload(**run.workload), SHAPES[run.workload["shape"]]
    prompts, completions = workload.prompt_tokens(1), workload.completion_tokens()
    if shape.vision is not None:
        media = [shape.media_tokens(row) for row in range(len(prompts))]
        text = run.prompt_tokens // workload.completions - sum(media) // len(media)
        prompts = [text + tokens for tokens in media]
    return [(prompt + tokens, tokens) for prompt, group in zip(prompts, completions, strict=True) for tokens in group]


def _image_tokens(run: Run, plan: StepPlan, batch: BatchSizes) -> MediaTokens:
    shape = SHAPES[run.workload["shape"]]
    tokens = max(0, shape.image_tokens - 2)  # without those around the image
    return media_tokens_of(plan, batch, [tokens] * batch.global_batch_size)

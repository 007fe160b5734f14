"""Checks of arguments that need no model, no process group and nothing on disk but the model's config.json.

Pure functions on plain values. Each raises ValueError that says what is wrong, with which flag, and which value works.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model must be divisible. None: its config.json does not say so under a usual name."""

    name: str
    attention_heads: int | None
    kv_heads: int | None  # of attention with grouped queries
    ffn: int | None
    layers: int | None
    experts: int | None
    expert_ffn: int | None
    linear_heads: tuple[int, ...] = ()  # of linear attention


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The layout, in ms-swift's names."""

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    vllm_tensor_parallel_size: int
    virtual_pipeline_model_parallel_size: int = 1
    microbatch_group_size_per_vp_stage: int | None = None
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    extra_layers: int = 0  # the embedding and the loss, where each counts as a layer

    def sizes(self, flag: str, suits: Callable[[int], bool]) -> list[int]:
        """The values of a flag that suit and divide the world, the other flags as they are."""
        flags = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        rest = math.prod(getattr(self, other) for other in flags if other != flag)
        return [n for n in range(1, self.world_size + 1) if self.world_size % (n * rest) == 0 and suits(n)]


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run them all and report everything that is wrong at once."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))  # two checks may find the same


@contextmanager
def said_of(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise ValueError(f"{what}: {problem}") from problem


# ---- the model


def check_model_path(model: str, flag: str = "model", bare_ids: bool = False) -> None:
    """A local folder with a config.json, or what may be a hub's id; with `bare_ids` also one without a slash."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--{flag} {model}: the folder {path.resolve()} has no config.json, so it holds no model")
        return
    looks_local = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if not looks_local and (_HUB_ID.fullmatch(model) or bare_ids):
        return
    advice = "give a folder with a config.json, or a hub id of the form organisation/name"
    raise ValueError(f"--{flag} {model}: there is no folder {path.resolve()}{_similar_folders(path)}; {advice}")


def _similar_folders(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    siblings = [each.name for each in path.parent.iterdir() if each.is_dir()]
    close = difflib.get_close_matches(path.name, siblings)
    return f" (next to it: {', '.join(close)})" if close else ""


def read_model_shape(folder: str | Path) -> ModelShape:
    """From config.json as transformers writes it; the text part of a composed model."""
    path = Path(folder).expanduser() / "config.json"
    with path.open(encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    text = {**config, **(config.get("text_config") or {})}

    def number(*keys: str) -> int | None:
        return next((text[key] for key in keys if isinstance(text.get(key), int)), None)

    latent = "kv_lora_rank" in text  # every rank holds the whole latent; heads are all alike
    linear = [number("linear_num_key_heads"), number("linear_num_value_heads")]
    return ModelShape(
        name=str(folder),
        attention_heads=number("num_attention_heads"),
        kv_heads=None if latent else number("num_key_value_heads"),
        ffn=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        experts=number("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts"),
        expert_ffn=number("moe_intermediate_size"),
        linear_heads=tuple(heads for heads in linear if heads is not None),
    )


# ---- the layout


def check_layout(layout: Parallelism, model: ModelShape) -> None:
    for flag in (each.name for each in fields(Parallelism) if each.name.endswith("_parallel_size")):
        if getattr(layout, flag) <= 0:
            raise ValueError(f"{flag} must be > 0, got {getattr(layout, flag)}; use --{flag} 1")
    check_all(
        [
            lambda: _check_tensor_parallel(layout, model),
            lambda: _check_pipeline(layout, model),
            lambda: _check_experts(layout, model),
            lambda: _check_vllm_tensor_parallel(layout, model),
        ]
    )


def _check_tensor_parallel(layout: Parallelism, model: ModelShape) -> None:
    """What megatron-core 0.16 demands."""
    tp = layout.tensor_model_parallel_size
    problem = _tensor_parallel_problem(tp, model)
    if problem:
        works = layout.sizes("tensor_model_parallel_size", lambda size: not _tensor_parallel_problem(size, model))
        advice = _use("tensor_model_parallel_size", works)
        raise ValueError(f"tensor_model_parallel_size ({tp}) {problem} of {model.name}{advice}")


def _tensor_parallel_problem(tp: int, model: ModelShape) -> str | None:
    if model.attention_heads is not None and model.attention_heads % tp:
        return f"must divide num_attention_heads ({model.attention_heads})"
    if model.kv_heads is not None and model.kv_heads % tp and tp % model.kv_heads:
        return f"must divide, or be a multiple of, num_key_value_heads ({model.kv_heads})"
    for heads in model.linear_heads:
        if heads % tp:
            return f"must divide the linear attention heads ({heads})"
    if model.ffn is not None and model.ffn % tp:
        return f"must divide intermediate_size ({model.ffn})"
    return None


def _check_pipeline(layout: Parallelism, model: ModelShape) -> None:
    if model.layers is None:
        return
    layers, stages = model.layers, layout.pipeline_model_parallel_size
    virtual = layout.virtual_pipeline_model_parallel_size
    given = [size for size in (layout.first_stage_layers, layout.last_stage_layers) if size is not None]

    def layers_of_stages(stages: int) -> set[int] | None:
        """How many layers a pipeline stage holds; None: they cannot be split evenly."""
        rest, rest_stages = layers + layout.extra_layers - sum(given), stages - len(given)
        if rest <= 0 or rest_stages <= 0:
            return set(given) if rest == 0 and rest_stages == 0 else None
        return {*given, rest // rest_stages} if rest % rest_stages == 0 else None

    held = layers_of_stages(stages)
    if held is None:
        works = layout.sizes("pipeline_model_parallel_size", lambda size: layers_of_stages(size) is not None)
        raise ValueError(
            f"pipeline_model_parallel_size ({stages}) must divide the {layers} layers of {model.name}, less those that "
            "--decoder_first_pipeline_num_layers and --decoder_last_pipeline_num_layers give to the end stages, plus "
            f"those that the account_for flags count{_use('pipeline_model_parallel_size', works)}, or set these flags"
        )
    if virtual > 1 and stages == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({virtual}) cuts the stages of a pipeline, and "
            "pipeline_model_parallel_size is 1; use --pipeline_model_parallel_size 2, or leave it out"
        )
    if any(size % virtual for size in held):
        works = [v for v in range(1, max(held) + 1) if not any(size % v for size in held)]
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({virtual}) must divide the layers of every pipeline stage "
            f"({' and '.join(map(str, sorted(held)))} of the {layers} of {model.name})"
            f"{_use('virtual_pipeline_model_parallel_size', works)}"
        )


def _check_experts(layout: Parallelism, model: ModelShape) -> None:
    ep, etp, pp = (
        layout.expert_model_parallel_size,
        layout.expert_tensor_parallel_size,
        layout.pipeline_model_parallel_size,
    )
    if model.experts is None:
        for flag, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp)):
            if size > 1:
                raise ValueError(f"{flag} ({size}) needs experts, and {model.name} has none; use --{flag} 1")
        return
    works = [
        n for n in range(1, model.experts + 1) if model.experts % n == 0 and layout.world_size % (n * etp * pp) == 0
    ]
    if ep not in works:
        raise ValueError(
            f"expert_model_parallel_size ({ep}) must divide the {model.experts} experts of {model.name}, and times "
            f"expert_tensor_parallel_size ({etp}) times pipeline_model_parallel_size ({pp}) the world size "
            f"({layout.world_size}){_use('expert_model_parallel_size', works)}"
        )
    if model.expert_ffn is not None and model.expert_ffn % etp:
        raise ValueError(
            f"expert_tensor_parallel_size ({etp}) must divide moe_intermediate_size ({model.expert_ffn}) of "
            f"{model.name}; use --expert_tensor_parallel_size 1"
        )
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size ({layout.tensor_model_parallel_size}) with experts needs sequence parallelism"
            "; use --sequence_parallel true"
        )


def _check_vllm_tensor_parallel(layout: Parallelism, model: ModelShape) -> None:
    def suits(size: int) -> bool:
        heads, kv_heads = model.attention_heads or size, model.kv_heads or size
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    works = [size for size in range(1, layout.world_size + 1) if layout.world_size % size == 0 and suits(size)]
    if layout.vllm_tensor_parallel_size not in works:
        raise ValueError(
            f"vllm_tensor_parallel_size ({layout.vllm_tensor_parallel_size}) must divide world size "
            f"({layout.world_size}) and suit num_attention_heads ({model.attention_heads}) and num_key_value_heads "
            f"({model.kv_heads}) of {model.name}{_use('vllm_tensor_parallel_size', works)}"
        )


def _use(flag: str, works: Sequence[int]) -> str:
    return f"; use --{flag} {' or '.join(map(str, works))}" if works else ""


# ---- rewards


def check_reward_functions(names: Sequence[Any], known: Iterable[str]) -> None:
    """`names` as in --reward_funcs; a callable, from a script, needs no registry."""
    if not names:
        choices = ", ".join(sorted(known))
        raise ValueError(f"no reward function is set; use --reward_funcs with one or more of {choices}")
    check_registered("reward_funcs", [name for name in names if isinstance(name, str)], known, "swift.rewards.orms")


def check_registered(flag: str, names: Iterable[str], known: Iterable[str], registry: str) -> None:
    """What ms-swift looks up by name, some of it only when the model is loaded."""
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            meant = f"; did you mean {' or '.join(close)}?" if close else ";"
            raise ValueError(
                f"unknown name {name!r} in --{flag}{meant} known are {', '.join(known)}, and what a "
                f"file given to --external_plugins adds to {registry}"
            )


def check_reward_weights(weights: Sequence[float] | None, num_functions: int) -> None:
    if weights is not None and len(weights) != num_functions:
        raise ValueError(
            f"reward_weights has {len(weights)} values for {num_functions} reward functions; give --reward_weights one "
            "value for each, or leave it out"
        )


def check_plugin_files(paths: Sequence[str]) -> None:
    missing = [path for path in paths if not Path(path).expanduser().is_file()]
    if missing:
        raise ValueError(f"--external_plugins {missing[0]}: there is no file {Path(missing[0]).expanduser().resolve()}")


# ---- generation, training

VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def check_adapter_sync(
    enabled: bool, has_adapter: bool, rank: int, sleep_level: int, mcore_model: str | None, sync_check: str
) -> None:
    """--vllm_enable_lora: vLLM has the checkpoint and gets the adapter only."""
    if not enabled:
        return
    if not has_adapter:
        raise ValueError("--vllm_enable_lora true is for --tuner_type lora, and there is no adapter; leave it out")
    if rank > VLLM_LORA_RANKS[-1]:
        raise ValueError(
            f"--vllm_enable_lora true: vLLM takes adapters up to rank {VLLM_LORA_RANKS[-1]}, and --lora_rank is "
            f"{rank}; use --vllm_enable_lora false, which merges the adapter"
        )
    if mcore_model is not None:
        raise ValueError(
            "--vllm_enable_lora true: vLLM runs the adapter on --model, and the trainer on --mcore_model "
            f"{mcore_model}; use --vllm_enable_lora false, which sends merged weights"
        )
    if sleep_level == 2:
        raise ValueError(
            "--sleep_level 2 discards vLLM's weights, and with --vllm_enable_lora true only the adapter is sent again; "
            "use --sleep_level 1, or --vllm_enable_lora false"
        )
    if sync_check == "full":
        raise ValueError(
            "--sync_check full compares the tensors of a model, and with --vllm_enable_lora true vLLM scales and fuses "
            "those of the adapter; use --sync_check canary, or --vllm_enable_lora false"
        )


def check_lengths(max_length: int | None, max_completion_length: int, vllm_max_model_len: int | None) -> None:
    if max_completion_length < 1:
        raise ValueError(
            f"max_completion_length must be > 0, got {max_completion_length}; use --max_completion_length 512"
        )
    needed = (max_length or 1) + max_completion_length
    if vllm_max_model_len is not None and vllm_max_model_len < needed:
        prompt = "one token of prompt" if max_length is None else f"max_length ({max_length})"
        shorter = vllm_max_model_len - (max_length or 1)
        or_shorter = f", or --max_completion_length {shorter}" if shorter > 0 else ""
        raise ValueError(
            f"vllm_max_model_len ({vllm_max_model_len}) is shorter than {prompt} + max_completion_length "
            f"({max_completion_length}) = {needed}; use --vllm_max_model_len {needed}{or_shorter}"
        )


def check_vllm_installed() -> None:
    if find_spec("vllm") is None:
        raise ValueError('vLLM is not installed and generates the completions; pip install "swift-megatron-grpo[gpu]"')


def check_duration(train_iters: int | None, num_train_epochs: int | None) -> None:
    if train_iters is None and num_train_epochs is None:
        raise ValueError("nothing says how long to train; use --num_train_epochs 1 or --train_iters 100")


def check_micro_batches(max_tokens: int | None, infer_max_tokens: int | None, infer_batch_size: int | None) -> None:
    for flag, value, suits in (
        ("max_tokens_per_micro_batch", max_tokens, 16384),
        ("infer_max_tokens_per_micro_batch", infer_max_tokens, 32768),
        ("infer_batch_size", infer_batch_size, 16),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}; use --{flag} {suits}, or leave it out")
    if infer_max_tokens is not None and infer_batch_size is not None:
        raise ValueError(
            f"--infer_max_tokens_per_micro_batch {infer_max_tokens} and --infer_batch_size {infer_batch_size} both say "
            "how large micro batches are that are only looked at; leave one of them out"
        )


def check_iterations(num_iterations: int) -> None:
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be > 0, got {num_iterations}; use --num_iterations 1")


def check_interleaving(layout: Parallelism, micro_batches: int | None) -> None:
    """`micro_batches`: of one optimizer step on each data-parallel rank; None: a token budget forms them."""
    stages, group = layout.pipeline_model_parallel_size, layout.microbatch_group_size_per_vp_stage
    if layout.virtual_pipeline_model_parallel_size == 1:
        if group is not None:
            raise ValueError(
                f"--microbatch_group_size_per_vp_stage {group} belongs to --virtual_pipeline_model_parallel_size; "
                "leave it out or set both"
            )
        return
    if group is not None and group < stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage ({group}) must be at least pipeline_model_parallel_size ({stages}); "
            f"use --microbatch_group_size_per_vp_stage {stages}, or leave it out"
        )
    size = group or stages
    if micro_batches is not None and (micro_batches < size or 0 < micro_batches % size < stages):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({layout.virtual_pipeline_model_parallel_size}) needs micro batches "
            f"in groups of {size}, and global_batch_size / micro_batch_size / data parallel size is {micro_batches}; "
            f"make it a multiple of {size} with --global_batch_size or --micro_batch_size, or use "
            "--max_tokens_per_micro_batch"
        )

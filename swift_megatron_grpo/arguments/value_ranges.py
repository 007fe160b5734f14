"""The valid range of every numeric flag that is passed through to Megatron, vLLM or ms-swift, in one table.

Those libraries check some of the values after the models are loaded, with messages that name no flag, and others never.
Flags of the algorithm have their own checks in algorithm_checks.py, sizes of the layout in layout_checks.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The valid values of a flag, and one of them to suggest."""

    low: float
    use: float | str  # as a user types it
    high: float = math.inf
    above_low: bool = False  # True: `low` itself is not valid
    below_high: bool = False  # True: `high` itself is not valid
    why: str = ""

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        above = value > self.low if self.above_low else value >= self.low
        below = value < self.high if self.below_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.above_low else 'at least'} {_typed(self.low)}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.below_high else 'at most'} {_typed(self.high)}"


_SEED = Range(0, 42, high=2**31 - 1, why="numpy and vLLM accept no other seeds")
_BETA = Range(0, 0.9, high=1, below_high=True, why="it is a moving average, which would never forget")

_DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float")

RANGES: Mapping[str, Range] = {
    # sampling
    "temperature": Range(0.01, 1.0, why="vLLM samples at 0.01 below that, and the loss divides by the flag's value"),
    "top_p": Range(0, 1.0, high=1, above_low=True),
    "top_k": Range(-1, -1, why="-1 and 0 sample from all tokens"),
    "repetition_penalty": Range(0, 1.0, above_low=True),
    "eval_top_p": Range(0, 1.0, high=1, above_low=True),
    "eval_max_completion_length": Range(1, 512),
    "max_length": Range(2, 2048, why="prompts are truncated to that many tokens"),
    # learning rate
    "lr": Range(0, 1e-6, above_low=True, why="at 0 no weight is trained"),
    "min_lr": Range(0, 0),
    "lr_warmup_init": Range(0, 0),
    "lr_warmup_iters": Range(0, 0),
    "lr_warmup_fraction": Range(0, 0.05, high=1, below_high=True),
    "lr_decay_iters": Range(1, 1000),
    "lr_wsd_decay_iters": Range(1, 100),
    # optimizer
    "weight_decay": Range(0, 0.1),
    "start_weight_decay": Range(0, 0.1),
    "end_weight_decay": Range(0, 0.1),
    "clip_grad": Range(0, 1.0, why="0 does not clip"),
    "adam_beta1": _BETA,
    "adam_beta2": Range(0, 0.95, high=1, below_high=True, why=_BETA.why),
    "adam_eps": Range(0, 1e-8, above_low=True, why="at 0, a weight without a gradient becomes 0/0"),
    "sgd_momentum": Range(0, 0.9, high=1, below_high=True, why=_BETA.why),
    # what is trained
    "freeze_parameters_ratio": Range(0, 0, high=1),
    "lora_rank": Range(1, 8),
    "lora_alpha": Range(0, 32, above_low=True, why="the adapter is multiplied by it"),
    "lora_dropout": Range(0, 0, high=1, below_high=True),
    # duration, logs, checkpoints
    "train_iters": Range(1, 100),
    "num_train_epochs": Range(1, 1),
    "logging_steps": Range(1, 1),
    "save_steps": Range(1, 100),
    "save_total_limit": Range(1, 2),
    "eval_steps": Range(1, 100),
    "eval_iters": Range(-1, -1, why="-1 evaluates all prompts"),
    "ddp_timeout": Range(1, 18000000),
    "seed": _SEED,
    "data_seed": _SEED,
    # data
    "split_dataset_ratio": Range(0, 0.01, high=1, below_high=True),
    "dataset_num_proc": Range(1, 1),
    # vLLM in the training processes
    "vllm_gpu_memory_utilization": Range(0, 0.5, high=1, above_low=True),
    "vllm_max_model_len": Range(1, 4096),
    "max_model_len": Range(2, 32768),
    "max_pixels": Range(784, 1003520, why="a picture has at least one patch"),
    "soft_cache_length": Range(1, 128, why="soft_overlong divides by it"),
    "soft_max_length": Range(2, 1024),
    "vllm_max_num_seqs": Range(1, 256),
    "vllm_mm_processor_cache_gb": Range(0, 4),
    "rollout_logprobs_interval": Range(0, 10, why="0 requests log-probs of the first rollout only"),
    # mixtures of experts
    "moe_z_loss_coeff": Range(0, 0.001),
}


def check_ranges(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for flags outside of RANGES, and for any other flag that is NaN or infinite.

    `values` and `defaults`: by flag. None is a flag that was not set.
    """
    problems = [
        f"--{flag} {_typed(values[flag])} must be {valid}{f': {valid.why}' if valid.why else ''}; "
        f"use --{flag} {valid.use}"
        for flag, valid in RANGES.items()
        if _is_number(values[flag]) and values[flag] not in valid
    ]
    for flag, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        infinite = [number for number in numbers if isinstance(number, float) and not math.isfinite(number)]
        if infinite and flag not in RANGES and flag != "reward_weights":  # value_checks.py checks them
            default = defaults[flag]
            advice = f"use --{flag} {default}" if _is_number(default) else "use a finite value, or leave it out"
            problems.append(f"--{flag} {infinite[0]} is not a finite number; {advice}")
    if problems:
        raise ValueError("\n".join(problems))


def check_schedule(values: Mapping[str, Any]) -> None:
    """Check the flags of the learning rate and weight decay against each other, as Megatron's schedule requires.

    Flags that ms-swift resolves later are None, and checked again afterwards.
    """
    lr, iterations = values["lr"], values["lr_decay_iters"] or values["train_iters"]
    problems = []
    if lr is not None and lr > 0:
        for flag in ("min_lr", "lr_warmup_init"):
            if values[flag] > lr:
                problems.append(f"--{flag} {values[flag]:g} must not be above --lr {lr:g}; use --{flag} 0")
    warm_up = values["lr_warmup_iters"]
    if iterations is not None and values["lr_warmup_fraction"] is None and 0 < iterations <= warm_up:
        problems.append(
            f"--lr_warmup_iters {warm_up} must be below the {iterations} iterations of training, or --lr would never "
            f"be reached; use --lr_warmup_iters {iterations // 10}"
        )
    if values["lr_decay_style"] == "WSD" and values["lr_wsd_decay_iters"] is None:
        problems.append(
            "--lr_decay_style WSD decays over the last --lr_wsd_decay_iters iterations, and this flag is not set; use "
            f"--lr_wsd_decay_iters {max(1, (iterations or 1000) // 10)}, or --lr_decay_style cosine"
        )
    start, end = values["start_weight_decay"], values["end_weight_decay"]
    if start is not None and end is not None and start > end:
        problems.append(
            f"--start_weight_decay {start:g} must not be above --end_weight_decay {end:g}; use --start_weight_decay "
            f"{end:g}"
        )
    if problems:
        raise ValueError("\n".join(problems))


def check_recompute(values: Mapping[str, Any]) -> None:
    """Check the flags of --recompute_granularity full, which Megatron refuses once the model is built."""
    if values["recompute_granularity"] != "full":
        return
    if values["recompute_method"] is not None and values["recompute_num_layers"] is None:
        raise ValueError(
            f"--recompute_method {values['recompute_method']} needs a number of layers; use --recompute_num_layers 1"
        )


def check_dtype(values: Mapping[str, Any]) -> None:
    typed = values["torch_dtype"]
    if isinstance(typed, str) and typed.removeprefix("torch.") not in _DTYPES:
        raise ValueError(f"--torch_dtype {typed} is no type of weights that can be trained; use --torch_dtype bfloat16")


def check_weight_decay(values: Mapping[str, Any]) -> None:
    """Check the flags of a changing weight decay as typed; ms-swift sets those that are left out."""
    style, ends = values["weight_decay_incr_style"], ("start_weight_decay", "end_weight_decay")
    given = [flag for flag in ends if values[flag] is not None]
    if style == "constant" and given:
        raise ValueError(
            f"--{given[0]} {values[given[0]]:g} has no effect on a constant weight decay; use "
            "--weight_decay_incr_style linear, or leave it out and use --weight_decay"
        )
    if style != "constant" and len(given) < len(ends):
        raise ValueError(
            f"--weight_decay_incr_style {style} needs both ends; use --start_weight_decay 0 --end_weight_decay "
            f"{values['weight_decay']:g}, or --weight_decay_incr_style constant"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _typed(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

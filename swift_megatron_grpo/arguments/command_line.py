"""The command line, checked before ms-swift's parser sees it, in one error: names, types and choices.

The parser ends at the first wrong value, below a usage of 400 lines, and suggests none. ms-swift looks at unknown names
last, and argparse ends at an ambiguous one: --save may be --save_steps.
"""

import difflib
import math
import re
from argparse import Action, ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.settings.flag import Faults, as_typed, raise_faults
from swift_megatron_grpo.settings.groups import RANGES

# Names of ms-swift 3.12, from its Megatron arguments.
RENAMED: Mapping[str, str] = {
    "train_type": "tuner_type", "max_epochs": "num_train_epochs", "save": "output_dir", "load": "mcore_model",
    "adapter_load": "mcore_adapter", "ref_load": "mcore_ref_model", "ref_adapter_load": "mcore_ref_adapter",
    "save_interval": "save_steps", "eval_interval": "eval_steps", "log_interval": "logging_steps",
    "tensorboard_log_interval": "logging_steps", "num_workers": "dataloader_num_workers",
    "manual_gc_interval": "manual_gc_steps",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "distributed_backend": "ddp_backend", "gradient_checkpointing_kwargs": "vit_gradient_checkpointing_kwargs",
    "seq_length": "max_length",
}  # fmt: skip
_CHANGED: Mapping[str, str] = {  # in name and value
    "save_retain_interval": "--save_total_limit, the number of checkpoints to keep",
    "distributed_timeout_minutes": "--ddp_timeout, in seconds",
    "num_layers_per_virtual_pipeline_stage": "--virtual_pipeline_model_parallel_size, the number of virtual stages",
    "num_virtual_stages_per_pipeline_rank": "--virtual_pipeline_model_parallel_size",
    "dataloader_type": "--train_dataloader_shuffle true or false",
    "no_initialization": "--perform_initialization true or false",
    "no_bias_swiglu_fusion": "--bias_activation_fusion false",
    "no_rope_fusion": "--apply_rope_fusion false",
    "no_data_sharding": "--data_sharding true or false",
    "use_flash_attn": "--attention_backend flash",
    "wandb_save_dir": "the environment variable WANDB_DIR",
    "logging_level": "the environment variable LOG_LEVEL",
    "moe_router_bias_update_rate": """--megatron_extra_kwargs '{"moe_router_bias_update_rate": 0.001}'""",
}
# Names of transformers and TRL, as `swift rlhf` has them, and common short ones.
_ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "--lr",
    "per_device_train_batch_size": "--micro_batch_size, in completions, and --global_batch_size",
    "per_device_eval_batch_size": "--num_generations_eval, the completions of a prompt",
    "gradient_accumulation_steps": "--global_batch_size, the completions of an optimizer step on all ranks",
    "max_steps": "--train_iters", "num_epochs": "--num_train_epochs", "warmup_ratio": "--lr_warmup_fraction",
    "warmup_steps": "--lr_warmup_iters", "lr_scheduler_type": "--lr_decay_style", "max_grad_norm": "--clip_grad",
    "adam_epsilon": "--adam_eps", "gradient_checkpointing": "--recompute_granularity full or selective",
    "save_only_model": "--no_save_optim true", "resume_from_checkpoint": "--mcore_model FOLDER --finetune false",
    "kl_coef": "--beta", "max_prompt_length": "--max_length, in tokens",
    "deepspeed": "--use_distributed_optimizer true, which shards the optimizer's states",
    "eval_strategy": "--eval_steps", "vllm_server_url": "--vllm_server_base_url", "lora_r": "--lora_rank",
    "dtype": "--torch_dtype bfloat16", "log_level": "the environment variable LOG_LEVEL",
    "tp": "--tensor_model_parallel_size", "pp": "--pipeline_model_parallel_size", "cp": "--context_parallel_size",
    "ep": "--expert_model_parallel_size", "tensor_parallel_size": "--tensor_model_parallel_size",
    "pipeline_parallel_size": "--pipeline_model_parallel_size", "expert_parallel_size": "--expert_model_parallel_size",
}  # fmt: skip
_FROM_CONFIG = """
    activation_func_clamp_value add_qkv_bias architectures attention_dropout disable_bias_linear ffn_hidden_size
    glu_linear_offset group_query_attention hidden_dropout hidden_size kv_channels kv_lora_rank layer_types
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    llm_architectures max_position_embeddings moe_apply_probs_on_input moe_ffn_hidden_size moe_layer_freq
    moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups moe_router_pre_softmax
    moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_intermediate_size
    mrope_interleaved mrope_section multi_latent_attention no_rope_freq norm_epsilon normalization num_attention_heads
    num_experts num_layers num_query_groups original_max_position_embeddings padded_vocab_size partial_rotary_factor
    position_embedding_type q_lora_rank qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim quick_geglu rotary_base
    rotary_interleaved rotary_percent softmax_type swiglu untie_embeddings_and_output_weights use_shared_expert_gate
    window_attn_skip_freq window_size
"""
_GONE = """
    auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_format ckpt_fully_parallel_load deterministic_mode
    exit_on_missing_checkpoint initialize_embedding load_safetensors log_memory_to_tensorboard log_params_norm
    log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard no_bias_dropout_fusion
    no_log_learning_rate_to_tensorboard transformer_impl
"""
_OF_MS_SWIFT_3: Mapping[str, str] = {
    **{old: f"use --{new}" for old, new in RENAMED.items()},
    **{old: f"use {advice}" for old, advice in _CHANGED.items()},
    **dict.fromkeys(_FROM_CONFIG.split(), "leave it out, because the model's config.json has the value"),
    **dict.fromkeys(_GONE.split(), "leave it out, because there is nothing to set any more"),
}

_KINDS = {"int": "an integer", "float": "a number", "string_to_bool": "true or false"}
_EXAMPLES: Mapping[str, str] = {
    "model": "with a folder or a hub id", "dataset": "with a file or a hub id", "output_dir": "with a folder",
    "loss_type": "grpo", "vllm_server_port": "8000", "reward_funcs": "with one or more reward functions",
}  # fmt: skip
_OF_TYPES: Mapping[Any, str] = {int: "8", float: "0.5", str: "with a value"}
_IGNORING = ("--ignore_args_error", "--ignore-args-error")
_ONE_DASH = re.compile(r"-(?!inf|nan)[A-Za-z][^ ]*$")  # argparse never reads it as a value
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # what argparse reads as a value
_LISTED = 12  # choices that a message lists
_AS_NEAR = 0.05  # difference of two ratios of difflib


def check_typed(command_line: Sequence[str]) -> None:
    """Raise one ValueError with all unknown flags, and all values that the parser would not accept.

    With --ignore_args_error true, unknown flags are left out, but for those of ms-swift 3: they have another name now.
    """
    raise_faults([*_faults_of_names(command_line, ignores_unknown(command_line)), *_faults_of_values(command_line)])


def ignores_unknown(command_line: Sequence[str]) -> bool:
    """Return True for a command line with --ignore_args_error."""
    typed = [values for flag, values in _values_by_flag(command_line, _options()) if flag in _IGNORING]
    return bool(typed) and "".join(typed[-1][:1]).lower() not in ("false", "f", "no", "n", "0")


@cache
def _options() -> Mapping[str, Action]:
    """Return the options of the parser, made as ms-swift makes it.

    Typing caches unions without regard to their order, so with megatron-core 0.18 a `dict | str` of ms-swift is a
    `str | dict`, of which the parser would take the last one as the type.
    """
    with _patch_get_type_hints():
        options: Mapping[str, Action] = HfArgumentParser([GRPOArguments])._option_string_actions
    return options


@cache
def known_flags() -> frozenset[str]:
    """Return the names of all flags, with --help and the --no_... of a boolean that is true."""
    return frozenset(option[2:].replace("-", "_") for option in _options() if option.startswith("--"))


# ---- names


def _faults_of_names(command_line: Sequence[str], ignores_unknown: bool) -> Faults:
    known = known_flags()
    for argument in command_line:
        name = argument.lstrip("-").split("=", 1)[0].replace("-", "_")
        if _ONE_DASH.match(argument) and argument not in _options() and (name in known or not ignores_unknown):
            advice = f"use --{name}" if name in known else "flags begin with two dashes; leave it out"
            yield f"{argument} is not a flag; {advice}"
        if not argument.startswith("--") or name in known or " " in name or not name:  # a value with a space, or --
            continue
        begin_alike = sum(flag.startswith(name) for flag in known)
        if name in _OF_MS_SWIFT_3:
            yield f"--{name} is a flag of ms-swift 3; {_OF_MS_SWIFT_3[name]}"
        elif ignores_unknown and begin_alike == 0:
            continue
        elif name in _ELSEWHERE:
            yield f"--{name} is not a flag of Megatron runs; use {_ELSEWHERE[name]}"
        elif begin_alike != 1:  # else it is an abbreviation
            near = " or ".join(f"--{flag}" for flag in _nearest(name, known))
            yield f"--{name} is not a flag; {f'did you mean {near}?' if near else 'leave it out'}"


def _nearest(name: str, known: Collection[str]) -> list[str]:
    """Return the flags that begin with this name, the one that it has a letter too many of, or those spelt alike."""
    begin_alike = sorted(flag for flag in known if flag.startswith(name))
    shorter = [name[:-1]] if name[:-1] in known else []
    alike = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.75)
    ratios = [difflib.SequenceMatcher(None, name, flag).ratio() for flag in alike]
    as_near = [flag for flag, ratio in zip(alike, ratios, strict=True) if ratio > ratios[0] - _AS_NEAR]
    return (begin_alike or shorter or as_near)[:5]


# ---- values


def _faults_of_values(command_line: Sequence[str]) -> Faults:
    options = _options()
    for flag, values in _values_by_flag(command_line, options):
        action = options[flag]
        if not values and action.nargs not in ("?", "*", 0):
            yield f"--{action.dest} has no value; use --{action.dest} {_example(action)}"
        for value in values:
            fault = _fault_of_value(action, value) or (_fault_of_dash(action, value) if value in command_line else None)
            yield from filter(None, [fault])


def _values_by_flag(command_line: Sequence[str], options: Collection[str]) -> list[tuple[str, list[str]]]:
    """Return the flags that are spelt out, with their values."""
    typed: list[tuple[str, list[str]]] = []
    known = False
    for argument in command_line:
        if (argument.startswith("--") or _ONE_DASH.match(argument)) and " " not in argument:
            flag, equals, value = argument.partition("=")
            known = flag in options
            if known:
                typed.append((flag, [value] if equals else []))
        elif known:
            typed[-1][1].append(argument)
    return typed


def _fault_of_value(action: Action, text: str) -> str | None:
    name, kind = action.dest, action.type
    try:
        value = kind(text) if callable(kind) else text
    except (ValueError, TypeError, ArgumentTypeError):
        type_name = kind.__name__ if isinstance(kind, type) else "string_to_bool"
        return f"--{name} {text} is not {_KINDS.get(type_name, type_name)}; use --{name} {_example(action)}"
    if isinstance(value, float) and not math.isfinite(value):
        advice = f"use --{name} {_example(action)}" if action.default is not None or name in RANGES else "leave it out"
        return f"--{name} {text} is not a finite number; {advice}"
    if action.choices is None or value in action.choices:
        return None
    choices = [as_typed(choice) for choice in action.choices]
    nearest_first = dict.fromkeys([*difflib.get_close_matches(text, choices, n=1), *choices])
    return f"--{name} {text}: unknown value; use --{name} {' or '.join(list(nearest_first)[:_LISTED])}"


def _fault_of_dash(action: Action, text: str) -> str | None:
    """Return why argparse reads a value as a flag: it begins with a dash, and is not a plain number."""
    if not text.startswith("-") or text == "-" or " " in text or _NEGATIVE.fullmatch(text):
        return None
    valid = RANGES.get(action.dest)
    if valid is not None and action.type is float and float(text) not in valid:
        return f"--{action.dest} {text} must be {valid}; use --{action.dest} {valid.use}"
    return f"--{action.dest} {text}: the parser reads {text} as a flag; use --{action.dest}={text}"


def _example(action: Action) -> str:
    """Return a value that works: of the table of ranges, a choice, the default, or a word for what it is."""
    name, default = action.dest, action.default
    if name in RANGES:
        return str(RANGES[name].use)
    if action.choices is not None:
        return " or ".join(as_typed(choice) for choice in list(action.choices)[:_LISTED])
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int | float | str) and default != "":
        return str(default)
    return _EXAMPLES.get(name) or _OF_TYPES.get(action.type if isinstance(action.type, type) else None, "true or false")

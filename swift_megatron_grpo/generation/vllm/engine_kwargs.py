"""Refuse the settings of --vllm_engine_kwargs that a flag sets, or that would make rollouts off-policy; pass the rest.

vLLM reads these settings directly. One that changes what the engine computes would change the policy that generates
without the trainer's knowledge, and one that a flag sets as well would be overwritten.
"""

import ast
import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLAG = "vllm_engine_kwargs"
EXPERTS = "enable_return_routed_experts"

_FLAGS = {
    "model": "model", "dtype": "torch_dtype", "seed": "seed", "revision": "model_revision",
    "tensor_parallel_size": "vllm_tensor_parallel_size", "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_len", "max_num_seqs": "vllm_max_num_seqs", "enforce_eager": "vllm_enforce_eager",
    "enable_prefix_caching": "vllm_enable_prefix_caching", "disable_cascade_attn": "vllm_disable_cascade_attn",
    "limit_mm_per_prompt": "vllm_limit_mm_per_prompt", "mm_processor_cache_gb": "vllm_mm_processor_cache_gb",
    "enable_lora": "vllm_enable_lora", "max_lora_rank": "lora_rank", "enable_sleep_mode": "sleep_level",
    "quantization": "rollout_quantization", EXPERTS: "router_replay_mode",
}  # fmt: skip
_PARALLEL = "an engine is one tensor-parallel group of training ranks; use --vllm_tensor_parallel_size"
_BY_CHANCE = "vLLM accepts draft tokens by chance, so completions depend on them, and a draft model receives no weights"
# A name that ends in an underscore is the beginning of a family of names.
_REASONS = {
    "the trainer sends weights of 16 or 32 bits, which vLLM quantizes with --rollout_quantization fp8":
        "quantization_config",
    f"{_BY_CHANCE}: drafts that change no completion come with --speculative_rollouts history or mtp":
        "speculative_config spec_",
    "the trainer reads the log-probs of the sampled distribution":
        "logprobs_mode kv_sharing_fast_prefill swa_bounded_replay",
    "completions are sampled from the policy, with --temperature, --top_p, --top_k and --repetition_penalty":
        """generation_config override_generation_config logits_processors reasoning_parser reasoning_config
        watermark_config diffusion_config enable_trace_replay""",
    "the engine runs the architecture, the code and the tokenizer of --model, as the trainer does": """
        hf_overrides hf_config_path config_format model_weights model_class_overrides model_impl code_revision tokenizer
        tokenizer_ skip_tokenizer_init override_attention_dtype runner convert disable_sliding_window
        trust_remote_code served_model_name engram_config""",
    "the adapter is that of the trainer, with --lora_rank and --vllm_enable_lora":
        "default_mm_loras lora_dtype lora_target_modules enable_tower_connector_lora",
    "the template prepares images, and the engine embeds them as the trainer does": """
        language_model_only enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_encoder_only mm_encoder_attn_dtype
        mm_encoder_fp8_ video_pruning_""",
    "weight syncs write to the engine's parameters on the GPU":
        "cpu_offload_ offload_ weight_transfer_config enable_cumem_allocator model_loader_extra_config",
    _PARALLEL: """
        pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size data_parallel_
        enable_expert_parallel enable_eplb enable_elastic_ep distributed_executor_backend nnodes node_rank
        disable_custom_all_reduce""",
    "the trainer drives the engine's worker and scheduler": "worker_cls worker_extension_cls scheduler_cls",
    "every request of a rollout must be completed by this engine, from its tokens":
        "max_num_queued_ kv_transfer_config ec_transfer_config tokens_only enable_prompt_embeds",
}  # fmt: skip
REFUSED: Mapping[str, str] = {name: f"use --{flag}" for name, flag in _FLAGS.items()} | {
    name: why for why, names in _REASONS.items() for name in names.split()
}
# What `swift rollout` calls the same flags, and why it refuses settings for which it has no flag.
_BY_SERVERS = {
    "max_lora_rank": "use --vllm_max_lora_rank",
    "enable_expert_parallel": "use --vllm_enable_expert_parallel",
    "disable_custom_all_reduce": "use --vllm_disable_custom_all_reduce",
    "enable_sleep_mode": "a server does not share its GPUs with a trainer, so it never sleeps",
    **dict.fromkeys(("speculative_config", "spec_"), _BY_CHANCE),
}
_PARALLEL_SERVER = "a server's engine is parallel by --vllm_tensor_parallel_size and --vllm_data_parallel_size"
REFUSED_BY_SERVERS: Mapping[str, str] = {
    name: _BY_SERVERS.get(name, _PARALLEL_SERVER if why == _PARALLEL else why)
    for name, why in REFUSED.items()
    if name != EXPERTS  # a trainer with --router_replay_mode R3 requires it of its servers
}
# Values that an engine has anyway, beyond None, False and what is empty: settings with them change nothing.
_SIZE_OF_ONE = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "data_parallel_size",
    "data_parallel_size_local", "nnodes",
)  # fmt: skip
_ANYWAY: Mapping[str, Any] = dict.fromkeys(_SIZE_OF_ONE, 1) | {
    "trust_remote_code": True, "enable_cumem_allocator": None, "cpu_offload_gb": 0, "node_rank": 0,
    "logprobs_mode": "processed_logprobs",
}  # fmt: skip
_OFF = ("none", "disabled", "auto", "")
# Other formats load quantized weights, or shards of another layout.
_LOAD_FORMATS = ("auto", "safetensors", "hf", "pt", "npcache", "dummy", "runai_streamer", "fastsafetensors")


def passed_on(
    settings: Mapping[str, Any], adapter_only: bool, flags: Mapping[str, Any], refused: Mapping[str, str] = REFUSED
) -> dict[str, Any]:
    """Return the settings without those that an engine has anyway. Raise ValueError for others that are refused."""
    refusable = [name for name in settings if _family(name, refused) is not None]
    kept = {n: value for n, value in settings.items() if n not in refusable or not _runs(n, value, flags)}
    problems = [f"--{FLAG}: {problem}" for problem in _problems(kept, adapter_only, refused)]
    if problems:
        raise ValueError("\n".join(problems))
    return kept


def _runs(name: str, value: Any, flags: Mapping[str, Any]) -> bool:
    """Return True if an engine has this value of a refused setting anyway."""
    flag = _FLAGS.get(name, f"vllm_{name}")
    if name == EXPERTS:  # which two flags set
        return False
    if flag not in flags:
        is_empty = value is None or value is False or value in ("", [], {})
        return bool(value == _ANYWAY[name]) if name in _ANYWAY else is_empty
    by_flag = flags[flag]
    if isinstance(value, bool) and not isinstance(by_flag, bool):  # enable_sleep_mode and --sleep_level
        return value == (by_flag not in (0, None, *_OFF))
    if value is None or value in _OFF:
        return by_flag is None or by_flag is False or by_flag in _OFF
    return bool(value == by_flag)


def _family(name: str, refused: Mapping[str, str]) -> str | None:
    """Return the name or the beginning of a name under which a setting is refused."""
    return next((f for f in refused if name == f or (f[-1] == "_" and name.startswith(f))), None)


def _problems(settings: Mapping[str, Any], adapter_only: bool, refused: Mapping[str, str]) -> Iterator[str]:
    known = settings_of_vllm()
    for name in settings:
        family = _family(name, refused)
        if family is not None:
            why = refused[family]
            yield f"{name}: {why}" if why.startswith("use --") else f"{name}: {why}; leave it out"
        elif known and name not in known:
            close = difflib.get_close_matches(name, sorted(known - refused.keys()), n=3)
            nearest = f"; did you mean {' or '.join(close)}?" if close else ""
            yield f"{name}: vLLM has no such setting{nearest}; leave it out"
    if not isinstance(settings.get(EXPERTS, False), bool):
        yield f"{EXPERTS} must be true or false, got {settings[EXPERTS]!r}"
    load_format = settings.get("load_format", "auto")
    if load_format not in _LOAD_FORMATS:
        formats = ", ".join(_LOAD_FORMATS)
        yield f"load_format {load_format!r} does not load the weights of --model as they are; use one of {formats}"
    if load_format == "dummy" and adapter_only:
        yield (
            "load_format 'dummy' starts with random weights, and with --vllm_enable_lora true only the adapter is "
            "sent; leave it out, or use --vllm_enable_lora false"
        )
    if settings.get("max_logprobs", 1) == 0:
        yield "max_logprobs 0 refuses the log-probs of sampled tokens, which this trainer reads; leave it out"


@cache
def settings_of_vllm() -> frozenset[str]:
    """Return the names of vLLM's settings, or none without vLLM. Read from its source, which is fast."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return frozenset()
    module = ast.parse(Path(vllm.origin).with_name("engine").joinpath("arg_utils.py").read_text())
    [group] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    fields = [node.target for node in group.body if isinstance(node, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


def parse_json_object(flag: str, value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the JSON object of a flag or of the file that it names. ms-swift would repair malformed JSON silently."""
    if not isinstance(value, str):
        return dict(value or {})
    is_file = Path(value).is_file()
    source, text = (f"the file {value}", Path(value).read_text()) if is_file else ("the value", value)
    advice = f"""use the form --{flag} '{{"name": 1}}', or leave it out"""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        raise ValueError(
            f"--{flag}: {source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}, near "
            f"{around!r}; {advice}"
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(f"--{flag}: {source} is not a JSON object but {json.dumps(parsed)[:40]}; {advice}")
    return parsed

"""Refused flags of ms-swift, flags that change nothing here, and refused types of models.

A flag of ms-swift is in neither table, and is read by this trainer or by ms-swift's own code. tests/unit/arguments/
test_flags.py lists them all, so a flag that a new ms-swift release adds fails that test by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_megatron_grpo import SWITCH
from swift_megatron_grpo.settings.flag import as_typed

STOCK_TRAINER = f"{SWITCH}=off for ms-swift's own trainer"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A flag of which this trainer supports only some values."""

    allowed: tuple[Any, ...]  # the default is one of them
    why: str
    stock: bool = True  # True if ms-swift's own trainer supports the other values


def _all(flags: str, allowed: tuple[Any, ...], why: str, stock: bool = True) -> dict[str, Refusal]:
    return dict.fromkeys(flags.split(), Refusal(allowed, why, stock))


_GENERATED = (
    "exactly the tokens that the policy generated are trained, all with weight 1: ms-swift's GRPO drops weights too; "
    "answers (--chord_sft_dataset) alone have weights"
)
_PACKED = "sequences are always packed, without padding between them"
_LOW_BITS = "training below 16 bits is not supported yet"
_OVERLAP = "this overlap is not supported yet"
_LENGTHS = "packed micro batches differ in length"

# Flags that refine how ms-swift's own trainer works: the default, and why another value changes no result here.
NOTED: Mapping[str, tuple[Any, str]] = {
    "calculate_per_token_loss": (False, "the loss is divided by the tokens or completions of the step in any case"),
    "mtp_decoder_input_detach": (False, "a layer of multi-token prediction reads what is detached in any case"),
    "padding_free": (True, "sequences are packed without padding in any case, and the loss is the same"),
    "offload_bridge": (
        False, "weights are sent to vLLM one tensor at a time, so there is no second copy of them to offload"
    ),
}  # fmt: skip

NOT_YET: Mapping[str, Refusal] = {
    # algorithm
    # ms-swift adds the second part for some models. With `default` no row may have earlier turns: data/checks.py.
    "loss_scale": Refusal(
        tuple(f"{base}{more}" for base in ("last_round", "default") for more in ("", "+ignore_empty_think")),
        _GENERATED,
        stock=False,
    ),
    "is_binary_loss_scale": Refusal((None,), _GENERATED, stock=False),
    # rollouts
    "use_vllm": Refusal((True,), "completions come from vLLM", stock=False),
    "move_model_batches": Refusal((None,), "weights are sent to vLLM one tensor at a time", stock=False),
    # rewards, teacher, reference
    "teacher_model_revision": Refusal((None,), "ms-swift's Megatron does not read it", stock=False),
    "mcore_ref_adapter": Refusal((None,), "the reference adapter is read from safetensors, with --ref_adapters"),
    # data
    "truncation_strategy": Refusal(
        (None, "left", "delete", "raise"), "the end of a prompt is the question, and one prompt is one row", stock=False
    ),
    "packing": Refusal((False,), "completions are packed after they are generated"),
    **_all("cached_dataset cached_val_dataset", ([],), "it holds tokens, and completions need messages", stock=False),
    "data_sharding": Refusal((False,), "every rank computes the order of all prompts"),
    "group_by_length": Refusal((False,), "prompts are not sorted by length", stock=False),
    # model
    "tuner_type": Refusal(
        ("full", "lora"),
        "a checkpoint of an adapter cannot hold the image part that lora_llm trains; --tuner_type lora --freeze_vit "
        "false trains an adapter of it",
    ),
    "lora_bias": Refusal(
        ("none",), "biases of the model are frozen, and an adapter is saved without them", stock=False
    ),
    "tuner_backend": Refusal(("peft",), "adapters are created with peft", stock=False),
    "task_type": Refusal((None, "causal_lm"), "the policy is a causal language model", stock=False),
    "new_special_tokens": Refusal(
        ([],),
        "vLLM loads the checkpoint, which has no rows for them; add them once with transformers (add_special_tokens, "
        "resize_token_embeddings, save_pretrained of model and tokenizer), and train that model",
    ),
    **_all("quant_method quant_bits", (None,), _LOW_BITS, stock=False),
    "bridge_backend": Refusal(("mcore-bridge",), "weights are converted by mcore-bridge"),
    # precision
    "fp16": Refusal((None, False), "fp16 needs a loss scaler, which skips steps, and a failed step stops the run"),
    **_all("fp8_format fp4_format", (None,), _LOW_BITS),
    **_all("fp8_param_gather fp4_param_gather", (False,), _LOW_BITS),
    # layout and communication
    "mlp_padding_free": Refusal((False,), _PACKED),
    "attention_backend": Refusal(("flash", "flash_2", "flash_3", "flash_4", "fused", "unfused", "auto"), _PACKED),
    "sequence_packing_scheduler": Refusal((None,), "this trainer has its own packing"),
    "cp_partition_mode": Refusal(
        ("zigzag",),
        "megatron-core rotates and attends by the positions of zigzag slices, so a model computes something else with "
        "contiguous ones; only DeepSeek-V4's attention takes them, which no supported megatron-core has",
    ),
    "tp_comm_overlap": Refusal((False,), _LENGTHS),
    "overlap_param_gather_with_optimizer_step": Refusal((False,), _OVERLAP),
    "use_megatron_fsdp": Refusal((False,), "Megatron-FSDP is not supported yet"),
    # optimizer
    "optimizer": Refusal(
        ("adam", "sgd", "muon"),
        "no test shares its matrices out to data-parallel ranks; muon updates them on every rank",
    ),
    "optimizer_cuda_graph": Refusal((False,), _LENGTHS),
    # other ways to start
    "use_ray": Refusal((False,), "`megatron rlhf` reads it and starts the ranks, which have no such flag"),
    **_all(
        "ray_exp_name device_groups",
        (None,),
        "`megatron rlhf --use_ray true` reads it, and the ranks have no such flag",
    ),
    "skip_megatron_init": Refusal((False,), "ranks are started by torchrun"),
}

# Of these, the flags that choose and weight the tokens of given answers: with --chord_sft_dataset they are accepted.
OF_ANSWERS = ("loss_scale", "is_binary_loss_scale")

# Flags that only some runs read: what such a run has, its test, and the flags.
READ_WITH: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    ("--beta above 0", lambda run: run["beta"] != 0, "kl_estimator kl_in_reward"),
    (
        "--beta above 0 and --kl_in_reward false", lambda run: run["beta"] != 0 and not run["kl_in_reward"],
        "use_bias_correction_kl",
    ),
    ("--streaming true", lambda run: run["streaming"], "shuffle_buffer_size"),
    ("--sync_ref_model true", lambda run: run["sync_ref_model"], "ref_model_sync_steps ref_model_mixup_alpha"),
    ("--kl_target", lambda run: run["kl_target"] is not None, "kl_horizon"),
    (
        "--teacher_model", lambda run: run["teacher_model"] is not None or run["_teacher_use_disable_adapter"],
        "teacher_model_type offload_teacher_model",
    ),
    (
        "--teacher_model and neither --advantage_reweight nor --sdar_loss_coef",
        lambda run: not run["advantage_reweight"] and not run["sdar_loss_coef"] and any(
            run[f] for f in ("teacher_model", "teacher_model_server", "_teacher_use_disable_adapter", "teacher_prompts")
        ),
        "teacher_kl_coef",
    ),
    (
        "--advantage_reweight rlsd", lambda run: run["advantage_reweight"] == "rlsd",
        "rlsd_lambda rlsd_reweight_clip_range rlsd_lambda_warmup_steps rlsd_lambda_decay_steps rlsd_negative_only",
    ),
    ("--sdar_loss_coef above 0", lambda run: bool(run["sdar_loss_coef"]), "sdar_gate_beta"),
    (
        "--teacher_model_server", lambda run: run["teacher_model_server"] is not None,
        "teacher_timeout teacher_tag_key",
    ),
    (
        "--reward_model", lambda run: run["reward_model"] is not None,
        "reward_model_plugin reward_model_timeout reward_model_type reward_template reward_adapters",
    ),
    (
        "--chord_sft_dataset", lambda run: bool(run["chord_sft_dataset"]),
        "chord_sft_per_device_train_batch_size chord_enable_phi_function chord_mu_warmup_steps chord_mu_decay_steps "
        "chord_mu_peak chord_mu_valley",
    ),
    ("--dynamic_sample true", lambda run: run["dynamic_sample"], "max_resample_times spare_groups"),
    (
        "--rollout_importance_sampling_mode", lambda run: run["rollout_importance_sampling_mode"] is not None,
        "rollout_importance_sampling_threshold",
    ),
    (
        "--reward_funcs soft_overlong", lambda run: "soft_overlong" in run["reward_funcs"],
        "soft_cache_length soft_max_length",
    ),
    (
        "--reward_funcs cosine", lambda run: "cosine" in run["reward_funcs"],
        "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct "
        "cosine_max_len_value_correct",
    ),
    (
        "--reward_funcs repetition", lambda run: "repetition" in run["reward_funcs"],
        "repetition_n_grams repetition_max_penalty",
    ),
    (
        "--tuner_type lora", lambda run: run["tuner_type"] == "lora",
        "lora_rank lora_alpha lora_dropout lora_dtype use_rslora target_modules target_regex modules_to_save",
    ),
    (
        "--optimizer adam or muon", lambda run: run["optimizer"] in ("adam", "muon"),
        "adam_beta1 adam_beta2 adam_eps",
    ),
    (
        "--optimizer muon", lambda run: run["optimizer"] == "muon",
        "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
        "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer",
    ),
    ("--optimizer sgd", lambda run: run["optimizer"] == "sgd", "sgd_momentum"),
    ("--optimizer_cpu_offload true", lambda run: run["optimizer_cpu_offload"], "optimizer_offload_fraction"),
    ("--lr_decay_style WSD", lambda run: run["lr_decay_style"] == "WSD", "lr_wsd_decay_style lr_wsd_decay_iters"),
    ("--report_to wandb", lambda run: "wandb" in run["report_to"], "wandb_project wandb_exp_name"),
    ("--report_to swanlab", lambda run: "swanlab" in run["report_to"], "swanlab_project swanlab_exp_name"),
    ("--report_to tensorboard", lambda run: "tensorboard" in run["report_to"], "tensorboard_dir"),
    ("--manual_gc true", lambda run: run["manual_gc"], "manual_gc_steps manual_gc_eval"),
    ("--check true", lambda run: run["check"], "check_gpu"),
)  # fmt: skip


def refusals(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for every flag whose value this trainer does not support."""
    for flag, refusal in NOT_YET.items():
        if flag in OF_ANSWERS and values["chord_sft_dataset"]:
            continue
        value = values[flag].name if isinstance(values[flag], Enum) else values[flag]
        if value in refusal.allowed:
            continue
        choices = [as_typed(choice) for choice in refusal.allowed if choice not in (None, False, [])]
        remedies = [f"use --{flag} {' or '.join(choices)}" if choices else "leave it out"]
        remedies += [STOCK_TRAINER] if refusal.stock else []
        yield f"--{flag} {as_typed(value)}: {refusal.why}; {', or '.join(remedies)}"


def notes_on_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return a line for the start-up log on every flag that is accepted and changes nothing."""
    unread = {flag: why for flag, (_, why) in NOTED.items()}
    for needed, is_read, flags in READ_WITH:
        unread |= {} if is_read(values) else dict.fromkeys(flags.split(), f"only a run with {needed} reads it")
    return [
        f"--{flag} {as_typed(values[flag])}: without effect, because {why}"
        for flag, why in unread.items()
        if values[flag] != defaults[flag]
    ]


# ---- types that mcore-bridge 1.6.5 converts; scripts/write_support_table.py writes them to docs/models.md

# A composite model is a language model with an image, video or audio part. These, all with images and videos, have been
# compared with plain transformers, on text and images, by a test. Those of OMNI also hear and speak; they have been
# compared on text, and the one that is in TAKES_IMAGES, TAKES_RECORDINGS and TAKES_VIDEOS on these as well. Those of
# ON_TEXT_ALONE, which have images and videos, have been compared on text.
COMPOSITE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "internvl",
)  # fmt: skip
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
ON_TEXT_ALONE = ("minicpmv4_6",)
ALL_COMPOSITE = (*COMPOSITE, *OMNI, *ON_TEXT_ALONE)
TAKES_IMAGES = (*COMPOSITE, "qwen3_omni_moe")
TAKES_RECORDINGS = ("qwen3_omni_moe",)
TAKES_VIDEOS = tuple(name for name in TAKES_IMAGES if name.startswith("qwen"))
INTERNVL_LANGUAGES = ("qwen2", "qwen3", "qwen3_moe")
# Text types that tests compare with plain transformers, those of them that vLLM has not run in a test, because it
# cannot on a CPU, and types that mcore-bridge reads exactly as one of them.
TEXT = (
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "dots1", "ernie4_5", "glm4", "glm4_moe",
    "gpt_oss", "hy_v3", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minimax_m2",
)  # fmt: skip
WITHOUT_ENGINE = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minimax_m2")
READ_AS = {"internlm3": "llama", "kimi_k2": "deepseek_v3", "mimo": "qwen2"}
_CODE_IN_CHECKPOINT = "its code is part of the checkpoint (trust_remote_code), so no test can make a small one"
_PADDED = "ms-swift 4.6 trains it with padding only"
_GEMMA4 = f"mcore-bridge 1.6.5 reads global_head_dim, which transformers 5.19 has no longer, and {_PADDED}"
_SPARSE = (
    "megatron-core below 0.19 has no sparse attention (DSA) of packed sequences; with 0.19.2, which this package does "
    "not allow yet, mcore-bridge 1.6.5 needs fast_hadamard_transform, and with it a GPU, where no test has compared it"
)
# Text types that mcore-bridge 1.6.5 converts, and the reason why this trainer refuses them.
REFUSED_TEXT: Mapping[str, str] = {
    **dict.fromkeys(("bailing_hybrid", "bailing_moe", "deepseek"), _CODE_IN_CHECKPOINT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE),
    "deepseek_v4": "no megatron-core up to 0.19.2 has its attention (dsv4_hybrid)",
    "ernie4_5_moe": "mcore-bridge 1.6.5 does not read the bias of its routers (moe_statics.e_score_correction_bias)",
    "nemotron_h": (
        "its language model is a HybridModel: megatron-core 0.16.1 has none, and in 0.18.2 and 0.19.2 it lacks the "
        "method that this trainer replaces to compute log-probs (_forward_output_layer); its Mamba layers need "
        "mamba-ssm, and with it a GPU"
    ),
}
# Types that mcore-bridge 1.6.5 converts, and the reason why this trainer refuses them; it converts deepseek_v41 with a
# newer megatron-core only.
REFUSED_COMPOSITE: Mapping[str, str] = {
    **dict.fromkeys(("internvl_chat", "kimi_vl", "llava_onevision1_5", "ovis2_5"), _CODE_IN_CHECKPOINT),
    "deepseek_v41": "no megatron-core up to 0.19.2 has its layers (hybrid_dsv4_stack_spec)",
    "glm5_next": "no megatron-core up to 0.19.2 has what its layers need (mark_keep_in_fp32)",
    **dict.fromkeys(("gemma4", "gemma4_unified"), _GEMMA4),
    "kimi_k25": "mcore-bridge 1.6.5 builds its image part from code in the checkpoint (trust_remote_code)",
    "llama4": f"mcore-bridge 1.6.5 does not read its attention_chunk_size, and {_PADDED}",
    "muse_glimmer": _PADDED,
    "qwen3_asr": "mcore-bridge 1.6.5 takes its audio part from the package qwen-asr, which needs transformers 4.57.6",
    "qwen4_exp": (
        "beyond indexer_budget tokens mcore-bridge 1.6.5 attends with a Triton kernel, which needs a GPU, where no "
        "test has compared it yet"
    ),
}

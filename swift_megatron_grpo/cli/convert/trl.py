"""The table of TRL: fields of GRPOConfig, of its model and its script, and arguments of GRPOTrainer and LoraConfig."""

from functools import partial
from typing import Any

from swift_megatron_grpo.cli.convert.rules import TARGETS, adapter
from swift_megatron_grpo.cli.convert.tables import (
    ByHand,
    Computed,
    Flags,
    Needless,
    NoCounterpart,
    Rule,
    Table,
    Together,
    Undecided,
    choice,
    each,
    flags,
    values_of,
    when_positive,
    whole,
)

_OWN = Needless("chosen by this trainer")
_REWARDS = ByHand(
    "accuracy_reward is --reward_funcs accuracy, whose answers are in \\boxed{} or <answer>; another function becomes "
    "a class in --external_plugins (docs/datasets_and_rewards.md)"
)
_ROWS = ByHand("write the rows that are made so to a file: messages, and columns for the rewards")
_EVALUATION = ByHand("--val_dataset has the rows of the evaluation")
_PEFT = ByHand("--tuner_type lora --lora_rank ... (docs/lora.md)")
_ADAPTER_FLAGS = "tuner_type lora_rank lora_alpha lora_dropout target_modules"
_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _batches(
    micro: Any, accumulated: Any, processes: Any = None, steps: Any = None, rollout: Any = None, machines: Any = 1
) -> Flags:
    """Return sizes in completions. TRL counts those of one process."""
    if processes is None:
        raise Undecided("add the number of GPUs to this command, as num_processes=8")
    ranks, group = whole(processes), whole(micro) * whole(processes)
    step, generated = group * whole(accumulated), group * whole(accumulated if steps is None else steps)
    generated = generated if rollout is None else whole(rollout)
    several = {"NNODES": machines} if whole(machines) > 1 else {}
    sizes = {"micro_batch_size": micro, "global_batch_size": step, "NPROC_PER_NODE": ranks // machines, **several}
    return sizes if generated == step else sizes | {"generation_batch_size": generated}


def _length(steps: Any, epochs: Any) -> Flags:
    if steps > 0:
        return {"train_iters": whole(steps)}
    if epochs != int(epochs):
        raise NoCounterpart("a part of an epoch: use --train_iters")
    return {"num_train_epochs": int(epochs)}


def _steps(flag: str) -> Rule:
    def rule(value: Any) -> Flags:
        if value != int(value):
            raise NoCounterpart(f"a part of the training: use --{flag} with a number of steps")
        return {flag: int(value)}

    return Computed([flag], rule)


def _warmup(value: Any) -> Flags:
    return {"lr_warmup_fraction": value} if 0 < value < 1 else {"lr_warmup_iters": whole(value)} if value else {}


def _rows(name: Any, subset: Any = None) -> Flags:
    """Return a dataset of Hugging Face's hub, which ms-swift reads with this variable."""
    return {"dataset": name if subset is None else f"{name}:{subset}", "USE_HF": 1}


def _trackers(value: Any) -> Flags:
    names = value if isinstance(value, list) else [value]
    if not {*names} <= {"none", "tensorboard", "wandb", "swanlab"}:
        raise NoCounterpart("there are tensorboard, wandb and swanlab")
    return {"report_to": names}


def _correction(on: Any, vllm: Any, mode: Any, bound: Any) -> Flags:
    of_engine = {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": bound}
    return of_engine if on and vllm else {}


def _model_arguments(value: Any) -> Flags:
    if not isinstance(value, dict):
        raise NoCounterpart("not a dictionary")
    unknown = value.keys() - {"dtype", "torch_dtype", "attn_implementation", "use_cache", "trust_remote_code"}
    if unknown:
        raise NoCounterpart(f"there is no {', '.join(sorted(unknown))}")
    return {"torch_dtype": value.get("dtype", value.get("torch_dtype"))}


TRL = Table(
    "TRL",
    ("GRPOTrainer.", "model_name_or_path"),
    {
        # of GRPOConfig
        **flags("", """
            output_dir seed data_seed learning_rate:lr weight_decay adam_beta1 adam_beta2 adam_epsilon:adam_eps
            max_grad_norm:clip_grad save_total_limit run_name:wandb_exp_name
            eval_on_start:eval_before_train logging_dir:tensorboard_dir num_generations num_generations_eval
            max_prompt_length:max_length max_completion_length temperature top_p repetition_penalty num_iterations
            beta sync_ref_model ref_model_sync_steps ref_model_mixup_alpha use_bias_correction_kl epsilon epsilon_high
            delta importance_sampling_level reward_weights
            top_entropy_quantile sapo_temperature_neg:tau_neg sapo_temperature_pos:tau_pos
            vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
            mask_truncated_completions:overlong_filter off_policy_mask_threshold:off_policy_sequence_mask_delta
            log_completions log_unique_prompts:wandb_log_unique_prompts vllm_mode vllm_server_base_url vllm_server_host
            vllm_server_port vllm_server_timeout vllm_gpu_memory_utilization vllm_tensor_parallel_size
            vllm_max_model_length:vllm_max_model_len vllm_max_model_len"""),
        "shuffle_dataset": "dataset_shuffle train_dataloader_shuffle",
        "top_k": when_positive("top_k"),
        "min_p": when_positive("min_p"),
        "warmup_ratio": when_positive("lr_warmup_fraction"),
        "report_to": Computed(["report_to"], _trackers),
        "warmup_steps": Computed(["lr_warmup_iters", "lr_warmup_fraction"], _warmup),
        "logging_steps": _steps("logging_steps"),
        "save_steps": _steps("save_steps"),
        "eval_steps": _steps("eval_steps"),
        "save_strategy": values_of("save_strategy", "steps epoch", "a checkpoint is always saved at the end"),
        **each("", "eval_strategy logging_strategy", choice({"steps": {}, "no": {}}, "here it is counted in steps")),
        "lr_scheduler_type": values_of("lr_decay_style", "linear cosine constant constant_with_warmup:constant"),
        "optim": choice({"adamw_torch": {}, "adamw_torch_fused": {}}, "the optimizer is AdamW here"),
        "bf16": choice({"true": {"torch_dtype": "bfloat16"}, "false": {}}),
        "fp16": choice({"false": {}}, "fp16 needs a loss scaler, which this trainer does not have"),
        "gradient_checkpointing": choice({"true": _FULL_RECOMPUTE, "false": {}}),
        "loss_type": values_of("loss_type", "grpo bnpo dr_grpo dapo cispo sapo luspo vespo"),
        "scale_rewards": values_of("scale_rewards", "group batch none true:group false:none"),
        "multi_objective_aggregation": choice({"sum_then_normalize": {}}),
        "cast_lm_head_to_fp32": choice({"false": {}}),
        "vllm_enable_sleep_mode": choice({"true": {"sleep_level": 1}, "false": {}}),
        "generation_kwargs": ByHand("--temperature, --top_p, --top_k, --min_p, --repetition_penalty"),
        "use_vllm": Needless("completions come from vLLM"),
        "use_liger_kernel": Needless("--fast_kernels is on by default"),
        "disable_dropout": Needless("there is no dropout in the model"),
        "max_tool_calling_iterations": ByHand("see docs/multi_turn.md: --multi_turn_scheduler and --max_turns"),
        "model_init_kwargs": Computed(["torch_dtype"], _model_arguments),
        "resume_from_checkpoint": ByHand("to continue from a checkpoint: --resume auto, or --resume FOLDER"),
        **each("", "push_to_hub hub_*", ByHand("upload a checkpoint of --output_dir when the run has ended")),
        **each("", """
            remove_unused_columns do_train do_eval per_device_eval_batch_size gradient_checkpointing_kwargs tf32
            dataloader_* ddp_* deepspeed fsdp fsdp_config overwrite_output_dir log_level disable_tqdm
            num_completions_to_print ds3_gather_for_generation use_transformers_paged cache_implementation
            vllm_model_impl vllm_group_port ref_model_* trust_remote_code logging_first_step
            torch_empty_cache_steps config_file mixed_precision""", _OWN),
        # of the model and the script
        "model_name_or_path": "model",
        "model_revision": "model_revision",
        **each("", "dtype torch_dtype",
               values_of("torch_dtype", "bfloat16 float16 float32 auto: null:", "there is no such type")),
        "attn_implementation": ByHand("--attention_backend flash or fused"),
        **each("", "lora_target_modules LoraConfig.target_modules", TARGETS),
        "LoraConfig.task_type": choice({"CAUSAL_LM": {}}),
        **each("", "use_rslora LoraConfig.use_rslora", "use_rslora"),
        **each("", "load_in_4bit load_in_8bit", choice({"false": {}}, "training below 16 bits is not supported yet")),
        "dataset_train_split": choice({"train": {}}),
        "dataset_streaming": "streaming",
        "dataset_test_split": _EVALUATION,
        "datasets": _ROWS,
        "reward_funcs": _REWARDS,
        "config": ByHand("convert this file, with the other flags as KEY=VALUE"),
        # of GRPOTrainer
        "GRPOTrainer.model": "model",
        "GRPOTrainer.reward_funcs": _REWARDS,
        "GRPOTrainer.train_dataset": Computed(["dataset", "USE_HF"], _rows),
        "GRPOTrainer.eval_dataset": _EVALUATION,
        "GRPOTrainer.*_dataset.*": _ROWS,
        "GRPOTrainer.args": ByHand("convert the YAML file or the shell script that has these settings"),
        "GRPOTrainer.peft_config": _PEFT,
        **each("GRPOTrainer.", "processing_class callbacks optimizers reward_processing_classes", _OWN),
        **each("GRPOTrainer.", "tools rollout_func environment_factory", ByHand("see docs/multi_turn.md")),
    },
    defaults={
        "learning_rate": 1e-6, "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta2": 0.999,
        "max_steps": -1, "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "max_completion_length": 256, "temperature": 1.0, "beta": 0.0, "loss_type": "dapo",
        "scale_rewards": "group", "gradient_checkpointing": True, "vllm_gpu_memory_utilization": 0.3,
        "use_vllm": False, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_cap": 3.0,
    },
    together=(
        Together(_batches, "micro_batch_size global_batch_size generation_batch_size NPROC_PER_NODE NNODES",
                 micro="per_device_train_batch_size", accumulated="gradient_accumulation_steps",
                 processes="num_processes", steps="steps_per_generation", rollout="generation_batch_size",
                 machines="num_machines"),
        Together(_length, "train_iters num_train_epochs", steps="max_steps", epochs="num_train_epochs"),
        Together(_correction, "rollout_importance_sampling_mode rollout_importance_sampling_threshold",
                 on="vllm_importance_sampling_correction", mode="vllm_importance_sampling_mode",
                 bound="vllm_importance_sampling_cap", reads={"vllm": "use_vllm"}),
        Together(_rows, "dataset USE_HF", name="dataset_name", subset="dataset_config"),
        Together(partial(adapter, rank=16, alpha=32, dropout=0.05, on=False), _ADAPTER_FLAGS, on="use_peft",
                 rank="lora_r", alpha="lora_alpha", dropout="lora_dropout"),
        Together(partial(adapter, rank=8, alpha=8, dropout=0), _ADAPTER_FLAGS,
                 rank="LoraConfig.r", alpha="LoraConfig.lora_alpha", dropout="LoraConfig.lora_dropout"),
    ),
)  # fmt: skip

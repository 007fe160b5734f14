"""Flags of TRL's GRPOTrainer for a setting of the benchmark. Pure: TRL is not imported here.

A setting is `mbsN`, the completions of a forward pass, and any of PARTS, as in `mbs16+awake+liger`. Everything else
follows from the workload and from the flags that the two Megatron trainers receive.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import settings
from benchmarks.peers.settings import SwiftFlags, split_name

PARTS = {
    "awake": "vLLM keeps its memory during training, even if the other trainers' vLLM sleeps",
    "fp32": "weights and optimizer state in fp32 with autocast to bf16, TRL's default; otherwise all of them in bf16",
    "liger": "Liger's kernels and its fused loss",
    "recompute": "gradient checkpointing, TRL's default",
}


@dataclass(frozen=True, slots=True)
class TrlSetting:
    micro_batch: int
    parts: frozenset[str]

    @classmethod
    def parse(cls, name: str) -> TrlSetting:
        _, number, parts = split_name("TRL", name, ["mbs"], PARTS)
        return cls(number, parts)


def trl_flags(
    setting: TrlSetting, completions: int, generations: int, swift: SwiftFlags, dtype: str
) -> tuple[str, ...]:
    """Return the flags of trl_arm.py, in TRL's own names, without paths, lengths and steps.

    They make TRL compute the same step: one optimizer step per rollout, the same loss, optimizer and LoRA. On policy
    neither side needs log-probs of the old policy, so TRL's correction for the difference to vLLM's is off, as here.
    """
    if completions % setting.micro_batch:
        raise SystemExit(f"bench: TRL setting mbs{setting.micro_batch}: {completions} completions of a step are "
                         f"not divisible by it")  # fmt: skip
    half = dtype == "bfloat16"
    in_fp32 = not half or "fp32" in setting.parts
    values: dict[str, object] = {
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": completions // setting.micro_batch,
        "num_generations": generations,
        "vllm_gpu_memory_utilization": swift.vllm_gpu_memory_utilization,
        "vllm_enable_sleep_mode": swift.sleep_level > 0 and "awake" not in setting.parts,
        "enforce_eager": swift.vllm_enforce_eager,
        "dtype": "float32" if in_fp32 else "bfloat16",
        # peft keeps adapters in fp32; autocast computes with them in bf16.
        "bf16": half and (in_fp32 or swift.adapters),
        "gradient_checkpointing": "recompute" in setting.parts,
        "use_liger_kernel": "liger" in setting.parts,
        **_SAME_STEP,
    }
    if swift.adapters:
        values |= {"use_peft": True, "lora_r": swift.lora_rank, "lora_alpha": swift.lora_alpha}
        values["lora_dropout"] = settings.LORA_DROPOUT
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value).lower())]
    if swift.adapters:
        flags += ["--lora_target_modules", *swift.target_modules]
    return tuple(flags)


_SAME_STEP: dict[str, object] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": False,
    "loss_type": "grpo",
    "beta": 0.0,
    "temperature": settings.TEMPERATURE,
    "learning_rate": settings.LEARNING_RATE,
    "lr_scheduler_type": "cosine",
    "weight_decay": settings.WEIGHT_DECAY,
    "adam_beta1": settings.BETAS[0],
    "adam_beta2": settings.BETAS[1],
    "max_grad_norm": settings.CLIP_GRAD,
    "shuffle_dataset": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}

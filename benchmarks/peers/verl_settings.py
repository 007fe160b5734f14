"""Overrides of verl's configuration for a setting of the benchmark. Pure: verl is not imported here.

A setting is `mbsN`, completions of a micro batch that is padded, or `tokensN`, tokens of a micro batch without padding,
and any of PARTS, as in `mbs16+awake`. Written for verl 0.9.1: FSDP, hybrid engine, vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import settings
from benchmarks.peers.settings import SwiftFlags, split_name

PARTS = {
    "awake": "vLLM keeps its memory during training, even if the other trainers' vLLM sleeps",
    "bf16": "weights and optimizer state in bf16; otherwise in fp32, verl's default",
    "bypass": "vLLM's log-probs count as those of the old policy; otherwise verl computes them",
    "merged": "vLLM gets the weights with the adapters merged into them; otherwise the adapters, verl's default",
    "recompute": "gradient checkpointing, verl's default",
}
SAMPLER = Path(__file__).with_name("verl_sampler.py")
# Ray hands its processes the environment of the one that starts it.
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "benchmarks.peers.verl_shims",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token to the home folder
    "RAY_memory_monitor_refresh_ms": "0",  # it kills processes where the machine's memory grows as it is used
}


@dataclass(frozen=True, slots=True)
class VerlSetting:
    micro_batch: int | None  # completions; None: sized by tokens
    tokens: int | None
    parts: frozenset[str]

    @classmethod
    def parse(cls, name: str) -> VerlSetting:
        unit, number, parts = split_name("verl", name, ["mbs", "tokens"], PARTS)
        return cls(number if unit == "mbs" else None, number if unit == "tokens" else None, parts)


@dataclass(frozen=True, slots=True)
class VerlSizes:
    prompts: int  # of a step
    generations: int  # of a prompt
    prompt_tokens: int
    completion_tokens: int  # of every completion: verl has one response_length


def verl_overrides(setting: VerlSetting, sizes: VerlSizes, swift: SwiftFlags) -> tuple[str, ...]:
    """Return the overrides of verl.trainer.main_ppo, without paths and steps.

    They make verl compute the same step: GRPO with a mean per completion, beta 0, one optimizer step per rollout. Its
    adapters have no dropout, and no setting for it. There is no flash-attn where the benchmark runs, so attention is
    torch's, which is as fast on batches without padding.
    """
    if "merged" in setting.parts and not swift.adapters:
        raise SystemExit("bench: verl merges adapters only if --flags have --tuner_type lora; remove +merged")
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    length = sizes.prompt_tokens + sizes.completion_tokens
    micro = setting.micro_batch or 1
    tokens = setting.tokens or length * micro
    values: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": "bypass" in setting.parts,
        "data.train_batch_size": sizes.prompts,
        "data.max_prompt_length": sizes.prompt_tokens,
        "data.max_response_length": sizes.completion_tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{model}.use_remove_padding": setting.tokens is not None,
        f"{model}.enable_gradient_checkpointing": "recompute" in setting.parts,
        f"{model}.lora_rank": swift.lora_rank if swift.adapters else 0,
        f"{model}.lora_alpha": swift.lora_alpha,
        f"{model}.target_modules": _as_list(swift.target_modules),
        f"{model}.lora.merge": "merged" in setting.parts,
        f"{actor}.ppo_mini_batch_size": sizes.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.use_dynamic_bsz": setting.tokens is not None,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        f"{actor}.loss_agg_mode": "seq-mean-token-mean",
        f"{actor}.use_kl_loss": False,
        f"{actor}.optim.lr": settings.LEARNING_RATE,
        f"{actor}.optim.weight_decay": settings.WEIGHT_DECAY,
        f"{actor}.optim.betas": str(list(settings.BETAS)).replace(" ", ""),
        f"{actor}.optim.clip_grad": settings.CLIP_GRAD,
        f"{actor}.fsdp_config.model_dtype": "bf16" if "bf16" in setting.parts else "fp32",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": sizes.generations,
        f"{rollout}.temperature": settings.TEMPERATURE,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.max_model_len": length,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": swift.vllm_gpu_memory_utilization,
        f"{rollout}.free_cache_engine": swift.sleep_level > 0 and "awake" not in setting.parts,
        f"{rollout}.enforce_eager": swift.vllm_enforce_eager,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.log_prob_use_dynamic_bsz": setting.tokens is not None,
        f"{rollout}.log_prob_max_token_len_per_gpu": tokens,
        "reward.num_workers": 1,
        "trainer.v1.sampler.custom_sampler.path": SAMPLER,
        "trainer.v1.sampler.custom_sampler.name": "PromptSampler",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[file]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
    }
    return tuple(f"{name}={value}" for name, value in values.items())


def verl_paths(model: Path, rows: Path, reward: Path, output: Path, steps: int) -> tuple[str, ...]:
    """Return the overrides that differ between two starts of the same setting."""
    values = {
        "actor_rollout_ref.model.path": model,
        "data.train_files": rows,
        "data.val_files": rows,
        "reward.custom_reward_function.path": reward,
        "trainer.default_local_dir": output,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": steps,
        "hydra.run.dir": output,
    }
    return tuple(f"{name}={value}" for name, value in values.items())


def _as_list(names: tuple[str, ...]) -> str:
    return names[0] if names == ("all-linear",) else f"[{','.join(names)}]"

"""The settings of a run, and the flags of each trainer for them. Pure: no trainer is imported here.

Whatever a trainer leaves to a default is set here where the defaults differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.paths import REPOSITORY
from benchmarks.peers.settings import BETAS, CLIP_GRAD, TEMPERATURE, SwiftFlags
from benchmarks.peers.trl_settings import TrlSetting, trl_flags
from benchmarks.peers.verl_settings import VerlSetting, VerlSizes, verl_overrides, verl_paths

PLUGIN = REPOSITORY / "benchmarks" / "harness" / "instrument" / "sums.py"
VERL_REWARD = Path(__file__).with_name("reward.py")
MODEL_TYPE, TEMPLATE = "llama", "chatml"  # names of ms-swift
ENGINE = ("--vllm_gpu_memory_utilization", "0.1", "--sleep_level", "0")  # vLLM stays awake in all trainers
# Several runs share a GPU, so vLLM may not size its cache by the memory that it finds free.
CACHE = "kv_cache_memory_bytes"  # as vLLM calls it
CACHE_BYTES = 4_000_000_000  # 3 times what all completions of a step need at most


@dataclass(frozen=True)
class Settings:
    """Settings that all trainers share; `learn choose` chooses the learning rate and the group size."""

    steps: int = 300
    save_every: int = 60  # steps; the held-out accuracy of these weights is measured
    completions: int = 256  # of a step: one rollout, one optimizer step
    generations: int = 8  # of a prompt
    prompt_tokens: int = 128  # at most
    completion_tokens: int = 64  # at most
    learning_rate: float = 1e-5
    warm_up: int = 15  # steps in which the learning rate rises from 0; it is constant afterwards
    weight_decay: float = 0.0  # trainers differ in the parameters that they exempt
    clip: tuple[float, float] = (0.2, 0.28)  # below and above 1; without effect on policy
    dtype: str = "bfloat16"
    eager: bool = False  # vLLM without CUDA graphs

    @property
    def prompts(self) -> int:
        """Return the prompts of a step."""
        return self.completions // self.generations

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def engine(self) -> tuple[str, ...]:
        return (*ENGINE, "--vllm_enforce_eager", _text(self.eager))


@dataclass(frozen=True)
class Paths:
    model: Path
    rows: Path  # train.jsonl
    output: Path


def command_of(arm: str, settings: Settings, paths: Paths, seed: int, micro_batches: int = 1) -> list[str]:
    """Return the arguments of an arm's program; only TRL takes the number of its micro batches."""
    if arm == "trl":
        return _trl(settings, paths, seed, micro_batches)
    return _verl(settings, paths, seed) if arm == "verl" else _megatron(arm, settings, paths, seed)


def _megatron(arm: str, settings: Settings, paths: Paths, seed: int) -> list[str]:
    lr, (low, high) = settings.learning_rate, settings.clip
    values: dict[str, object] = {
        "rlhf_type": "grpo",
        "model": paths.model,
        "model_type": MODEL_TYPE,
        "template": TEMPLATE,
        "torch_dtype": settings.dtype,
        "tuner_type": "full",
        "dataset": paths.rows,
        "split_dataset_ratio": 0,
        "load_from_cache_file": False,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "external_plugins": PLUGIN,
        "reward_funcs": "sum",
        "num_generations": settings.generations,
        "global_batch_size": settings.completions,
        "steps_per_generation": 1,
        "max_length": settings.prompt_tokens,
        "max_completion_length": settings.completion_tokens,
        "temperature": TEMPERATURE,
        "loss_type": "grpo",
        "beta": 0,
        "epsilon": low,
        "epsilon_high": high,
        "lr": lr,
        "min_lr": lr,
        "lr_decay_style": "constant",
        "lr_warmup_iters": settings.warm_up,
        "weight_decay": settings.weight_decay,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "clip_grad": CLIP_GRAD,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_len": settings.tokens,
        "attention_backend": "flash",
        "recompute_granularity": "none",
        "train_iters": settings.steps,
        "seed": seed,
        "data_seed": seed,
        "output_dir": paths.output,
        "add_version": False,
        "save_steps": settings.save_every,
        "no_save_optim": True,
        "no_save_rng": True,
        "logging_steps": 1,
    }
    if settings.dtype == "float32":
        values["fp16"] = False
    if arm == "ours":
        values |= {"max_tokens_per_micro_batch": 16384, "report_to": "none"}
    else:  # ms-swift's own trainer needs prompts that are divisible by its micro batch, and refuses --report_to none
        values |= {"micro_batch_size": min(32, settings.prompts), "report_to": "tensorboard"}
        if settings.dtype != "float32":  # flash needs the package flash-attn, for which only this package has a kernel
            values["attention_backend"] = "fused"
    return [*_flags(values), *settings.engine, "--vllm_engine_kwargs", f'{{"{CACHE}": {CACHE_BYTES}}}']


def _trl(settings: Settings, paths: Paths, seed: int, micro_batches: int) -> list[str]:
    completions, (low, high) = settings.completions, settings.clip
    setting = TrlSetting.parse(f"mbs{completions // micro_batches}+awake+fp32")
    swift = SwiftFlags.parse(settings.engine)
    values: dict[str, object] = {
        "model_name_or_path": paths.model,
        "rows": paths.rows,
        "output_dir": paths.output,
        "max_steps": settings.steps,
        "max_completion_length": settings.completion_tokens,
        "vllm_max_model_length": settings.tokens,
        CACHE: CACHE_BYTES,
        "epsilon": low,
        "epsilon_high": high,
        "scale_rewards": "group",
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": settings.warm_up,
        "weight_decay": settings.weight_decay,
        "shuffle_dataset": True,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "save_only_model": True,
        "seed": seed,
    }
    # The last of two equal flags counts.
    return [*trl_flags(setting, completions, settings.generations, swift, settings.dtype), *_flags(values)]


def _verl(settings: Settings, paths: Paths, seed: int) -> list[str]:
    sizes = VerlSizes(settings.prompts, settings.generations, settings.prompt_tokens, settings.completion_tokens)
    # Padded rows: without flash-attn the attention of packed ones has a mask of all pairs of tokens.
    setting, swift = VerlSetting.parse("mbs64+awake"), SwiftFlags.parse(settings.engine)
    actor, (low, high) = "actor_rollout_ref.actor", settings.clip
    texts = (
        *verl_overrides(setting, sizes, swift),
        *verl_paths(paths.model, paths.output / "rows.parquet", VERL_REWARD, paths.output, settings.steps),
    )
    values: dict[str, object] = dict(text.split("=", 1) for text in texts) | {
        "data.shuffle": True,
        "data.seed": seed,
        f"{actor}.clip_ratio_low": low,
        f"{actor}.clip_ratio_high": high,
        f"{actor}.optim.lr": settings.learning_rate,
        f"{actor}.optim.lr_scheduler_type": "constant",
        f"{actor}.optim.lr_warmup_steps": settings.warm_up,
        f"{actor}.optim.weight_decay": settings.weight_decay,
        f"{actor}.checkpoint.save_contents": "[hf_model]",
        "actor_rollout_ref.rollout.ignore_eos": False,
        "actor_rollout_ref.rollout.seed": seed,
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.{CACHE}": CACHE_BYTES,
        "trainer.save_freq": settings.save_every,
    }
    return [f"{name}={value}" for name, value in values.items()]


def _flags(values: dict[str, object]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", _text(value))]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

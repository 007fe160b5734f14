"""Duration, checkpoints, data, trained weights and precision: flags of ms-swift's that its own code reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, rule

_DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float")


@dataclass(frozen=True, kw_only=True)
class Duration(Flags):
    """Length of a run, and intervals of logs and checkpoints."""

    train_iters: Annotated[int | None, AtLeast(1, use=100)]
    num_train_epochs: Annotated[int | None, AtLeast(1, use=1)]
    logging_steps: Annotated[int, AtLeast(1, use=1)]
    save_steps: Annotated[int, AtLeast(1, use=100)]
    save_total_limit: Annotated[int | None, AtLeast(1, use=2)]
    ddp_timeout: Annotated[int, AtLeast(1, use=18000000)]

    @rule
    def the_length_is_set(self) -> Faults:
        if self.train_iters is None and self.num_train_epochs is None:
            yield "the length of training is not set; use --num_train_epochs 1 or --train_iters 100"


@dataclass(frozen=True, kw_only=True)
class Data(Flags):
    """Rows of the datasets."""

    data_seed: Annotated[int | None, Range(0, 42, high=2**31 - 1, why="numpy and vLLM accept no other seeds")]
    dataset_num_proc: Annotated[int, AtLeast(1, use=1)]
    max_pixels: Annotated[int | None, AtLeast(784, use=1003520, why="an image has at least one patch")]
    soft_cache_length: Annotated[int | None, AtLeast(1, use=128, why="soft_overlong divides by it")]
    soft_max_length: Annotated[int | None, AtLeast(2, use=1024)]


@dataclass(frozen=True, kw_only=True)
class Model(Flags):
    """Trained weights, precision and recomputation."""

    freeze_parameters_ratio: Annotated[float, Range(0, 0, high=1)]
    lora_rank: Annotated[int, AtLeast(1, use=8)]
    lora_alpha: Annotated[int, Above(0, use=32, why="the adapter is multiplied by it")]
    lora_dropout: Annotated[float, Range(0, 0, high=1, below_high=True)]
    max_model_len: Annotated[int | None, AtLeast(2, use=32768)]
    moe_z_loss_coeff: Annotated[float | None, AtLeast(0, use=0.001)]
    torch_dtype: Any
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None

    @rule
    def megatron_recomputes_some_layers(self) -> Faults:
        full = self.recompute_granularity == "full"
        if full and self.recompute_method is not None and self.recompute_num_layers is None:
            yield (f"--recompute_method {self.recompute_method} needs a number of layers; use --recompute_num_layers 1")

    @rule
    def weights_of_this_type_can_be_trained(self) -> Faults:
        typed = self.torch_dtype
        if isinstance(typed, str) and typed.removeprefix("torch.") not in _DTYPES:
            yield f"--torch_dtype {typed} is not a type of weights that can be trained; use --torch_dtype bfloat16"

"""The trained weights, their precision, recomputation and kernels, and what may leave the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import torch

from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, as_typed, flag, rule, rule_as_typed
from swift_megatron_grpo.settings.layout import ModelShape
from swift_megatron_grpo.settings.modules import fault_of_names, frozen

_DTYPES = ("bfloat16", "float16", "half", "float32", "float")  # as torch names them, which ms-swift looks up
_NOTHING_TRAINED = (
    "freezes every weight, so nothing would be trained; leave it out, or use --trainable_parameters with the names of "
    "some weights"
)
_ONLY_FULL = (
    "freeze_parameters_ratio", "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex",
)  # fmt: skip


class Trained(Flags):
    """Flags that choose what is trained: they must leave something to train, and do what they name."""

    tuner_type: str
    freeze_parameters: list[str]
    freeze_parameters_ratio: Annotated[float, Range(0, 0, high=1)]
    freeze_parameters_regex: str | None
    trainable_parameters: list[str]
    trainable_parameters_regex: str | None
    target_modules: Any  # names; --target_regex once ms-swift has resolved it
    target_regex: str | None
    modules_to_save: list[str]
    lora_rank: Annotated[int, AtLeast(1, use=8)]
    lora_alpha: Annotated[int, Above(0, use=32, why="the adapter is multiplied by it")]
    max_model_len: Annotated[int | None, AtLeast(2, use=32768)]
    moe_z_loss_coeff: Annotated[float | None, AtLeast(0, use=0.001)]
    optimizer: str
    optimizer_cpu_offload: bool
    use_distributed_optimizer: bool
    model: str | None
    fp16: bool | None
    torch_dtype: Any
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None

    @property
    def freezing(self) -> str:
        """The flags that freeze weights, as typed; empty if there are none."""
        flags = ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio")
        return " ".join(f"--{flag} {as_typed(getattr(self, flag))}" for flag in flags if getattr(self, flag))

    @rule_as_typed
    def patterns_are_regular_expressions(self) -> Faults:
        """ms-swift logs a warning for one that it cannot read, and continues without it."""
        for name in ("freeze_parameters_regex", "trainable_parameters_regex", "target_regex"):
            pattern = getattr(self, name) or ""
            try:
                re.compile(pattern)
            except re.error as error:
                yield (
                    f"--{name} {pattern} is not a regular expression ({error}); use one that Python's re.search "
                    rf"accepts, for example --{name} 'layers\.[0-3]\.', or leave it out"
                )

    @rule_as_typed
    def some_weights_are_trained(self) -> Faults:
        given = [name for name in _ONLY_FULL if getattr(self, name)]
        if self.tuner_type != "full" and given:
            yield (
                f"--{given[0]} {as_typed(getattr(self, given[0]))} has no effect with --tuner_type {self.tuner_type}, "
                "which trains all of an adapter; leave it out, or choose the layers that have one: use "
                "--target_modules linear_qkv linear_proj"
            )
        elif not self.trainable_parameters and not self.trainable_parameters_regex:
            pattern = self.freeze_parameters_regex
            frozen_by = "freeze_parameters_ratio 1" if self.freeze_parameters_ratio == 1 else ""
            with suppress(re.error):  # which the rule above reports
                if pattern and re.search(pattern, ""):  # what is found in an empty name is found in every one
                    frozen_by = f"freeze_parameters_regex {pattern}"
            if frozen_by:
                yield f"--{frozen_by} {_NOTHING_TRAINED}"

    @rule
    def modules_of_an_adapter_exist(self, shape: ModelShape) -> Faults:
        """peft ignores a name that matches nothing if another one matches, and fails late if none does."""
        paths, pattern = shape.modules, self.target_regex
        if self.tuner_type != "lora" or not paths:
            return
        yield from self.faults_of_modules(paths)
        with suppress(re.error):  # which the rule above reports
            if pattern is not None and not any(re.fullmatch(pattern, path) for path in paths):
                yield (
                    rf"--target_regex {pattern} matches no module of this model, whose whole name is compared; leave "
                    r"it out and use --target_modules, or write a pattern such as '.*\.linear_qkv'"
                )

    def faults_of_modules(self, paths: Sequence[str]) -> Faults:
        """Yield the names that match none of these modules. `target_modules` is also what --target_regex becomes."""
        for name in ("target_modules", "modules_to_save") if self.target_regex is None else ("modules_to_save",):
            yield from filter(None, [fault_of_names(name, getattr(self, name), paths)])

    @rule
    def freezing_leaves_some_weights(self, shape: ModelShape) -> Faults:
        if self.tuner_type != "full" or not self.freezing or not shape.modules:
            return
        with suppress(re.error):  # which the rule above reports
            is_frozen = frozen(shape.modules, self.freeze_parameters, self.freeze_parameters_regex)
            is_thawed = frozen(shape.modules, self.trainable_parameters, self.trainable_parameters_regex)
            if all(is_frozen) and not any(is_thawed):
                yield f"{self.freezing} {_NOTHING_TRAINED}"

    @rule
    def megatron_recomputes_some_layers(self) -> Faults:
        method, layers, full = self.recompute_method, self.recompute_num_layers, self.recompute_granularity == "full"
        if full and method is None:
            yield (
                "--recompute_granularity full: --recompute_method chooses the layers; use --recompute_method uniform "
                "--recompute_num_layers 1"
            )
        elif full and layers is None:
            yield f"--recompute_method {method} needs a number of layers; use --recompute_num_layers 1"
        for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
            if self.recompute_granularity == "selective" and value is not None:
                yield (
                    f"--{name} {value} chooses whole layers, and --recompute_granularity selective recomputes parts of "
                    "all of them; leave it out, or choose some with --recompute_granularity full"
                )

    @rule
    def weights_of_this_type_can_be_trained(self) -> Faults:
        typed = self.torch_dtype
        if isinstance(typed, str) and typed.removeprefix("torch.") not in _DTYPES:
            use = "float32 with --fp16 false" if "32" in typed else "bfloat16"
            yield f"--torch_dtype {typed} is not a type of weights that can be trained; use --torch_dtype {use}"
        if self.fp16 is None and typed in (torch.float16, torch.float32):  # as resolved, from config.json
            yield (
                f"--model {self.model} has torch_dtype {str(typed).removeprefix('torch.')}, which ms-swift would train "
                "in fp16, and fp16 is not supported; use --torch_dtype bfloat16, or --fp16 false for fp32"
            )

    @rule
    def the_distributed_optimizer_has_these_states(self) -> Faults:
        """Megatron fails once the model is built."""
        if not self.use_distributed_optimizer:
            return
        if self.optimizer_cpu_offload and self.torch_dtype == torch.float32:
            yield (
                "--optimizer_cpu_offload true: Megatron's distributed optimizer cannot move states of fp32 weights to "
                "the CPU; use --torch_dtype bfloat16, or --use_distributed_optimizer false"
            )
        if self.optimizer == "sgd":
            yield (
                "--optimizer sgd needs --use_distributed_optimizer false, because Megatron's distributed optimizer "
                "shards the states of Adam only; set it, or use --optimizer adam"
            )


class Kernels(Flags):
    """The kernels of the model's layers, and what they recompute."""

    check_attention: bool = flag(
        True,
        "Compare output and gradients of the model's attention kernels with exact arithmetic before training, on "
        "random packed sequences, and end the run if one is wrong. It takes about a second. Default: true.",
    )
    fast_kernels: bool = flag(
        True,
        "Multiply all experts of a layer in one kernel, without expert parallelism do not sort tokens that are sorted "
        "by expert already, with it send a token's row once to a rank, and add adapters inside the products of their "
        "layers. On GPUs, also use Transformer Engine's kernels for rotary embedding, SwiGLU, norms and the "
        "accumulation of weight gradients, and this package's for SwiGLU of experts, where they compute the same as "
        "Megatron's. false: use Megatron's. Default: true.",
    )
    recompute_elementwise: bool = flag(
        False,
        "On GPUs, recompute the outputs of norms and SwiGLU in the backward pass instead of storing them, in micro "
        "batches of 4,096 tokens or more. This saves a quarter of activation memory and costs 5 to 7 %% of the time. "
        "It requires --fast_kernels. Default: false.",
    )
    attention_backend: Any
    context_parallel_size: int

    @rule
    def elementwise_needs_fast_kernels(self) -> Faults:
        if self.recompute_elementwise and not self.fast_kernels:
            yield (
                "--recompute_elementwise true needs the kernels that --fast_kernels false disables; leave one of them "
                "out"
            )

    @rule
    def unfused_attention_is_of_one_rank(self) -> Faults:
        if as_typed(self.attention_backend) == "unfused" and self.context_parallel_size > 1:
            yield (
                f"--attention_backend unfused with --context_parallel_size {self.context_parallel_size}: Transformer "
                "Engine has only flash and fused attention for context-parallel ranks; use --attention_backend flash"
            )


class Offloading(Flags):
    """State that may leave the GPU while vLLM generates; offload_model includes frozen reference and teacher."""

    offload_model: bool
    offload_optimizer: bool
    offload_teacher_model: bool = False
    offload_grad: bool = flag(
        False,
        "Allow the gradient buffers to leave the GPU while vLLM generates and log-probs are computed, in "
        "addition to --offload_model and --offload_optimizer. The buffers are empty between steps, so they are "
        "freed and not copied. As with those two flags, nothing is moved while everything fits. Default: false.",
    )

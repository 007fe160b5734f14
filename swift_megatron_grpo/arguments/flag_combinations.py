"""Refuse flags that are not supported, and flags that exclude each other."""

from __future__ import annotations

from swift_megatron_grpo import SWITCH
from swift_megatron_grpo.arguments.advice import typed_value
from swift_megatron_grpo.arguments.derived import DerivedArguments
from swift_megatron_grpo.arguments.support_table import unsupported_flags

STOCK_TRAINER = f"{SWITCH}=off for ms-swift's own trainer"


def check_flags(args: DerivedArguments) -> None:
    """Refuse unsupported flags, and combinations that no other check covers."""
    problems = unsupported_flags(vars(args), STOCK_TRAINER)
    if args.ref_model is not None and args.has_adapter:
        problems.append("--ref_model: the reference of a LoRA run is the model without its adapter; leave it out")
    if args.mcore_ref_model is not None and (args.has_adapter or args.ref_model is not None):
        reason = "the reference is the frozen copy of a run without an adapter, from one checkpoint"
        problems.append(f"--mcore_ref_model {args.mcore_ref_model}: {reason}; leave it or the other flag out")
    if args.has_adapter and args.expert_tensor_parallel_size > 1:
        problems.append(
            f"--expert_tensor_parallel_size {args.expert_tensor_parallel_size}: mcore-bridge does not support LoRA on "
            "tensor-parallel experts; use --expert_tensor_parallel_size 1, and distribute whole experts with "
            "--expert_model_parallel_size"
        )
    if args.recompute_elementwise and not args.fast_kernels:
        problems.append(
            "--recompute_elementwise true needs the kernels that --fast_kernels false disables; leave one of them out"
        )
    if typed_value(args.attention_backend) == "unfused":
        problems.extend(_unfused_problems(args.context_parallel_size, args.share_prompts == "true"))
    if problems:
        raise ValueError("\n".join(problems))


def _unfused_problems(cp_size: int, shares_prompts: bool) -> list[str]:
    problems = []
    if cp_size > 1:
        problems.append(
            f"--attention_backend unfused with --context_parallel_size {cp_size}: Transformer Engine has only flash "
            "and fused attention for context-parallel ranks; use --attention_backend flash"
        )
    if shares_prompts:
        problems.append(
            "--share_prompts true with --attention_backend unfused is not tested; use --share_prompts auto, which "
            "repeats prompts here, or --attention_backend flash"
        )
    return problems

"""Parallel layouts by name, such as tp2+sp, and the flags of each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from swift_megatron_grpo.cli.command_line import Refused

DENSE = [
    "mbs1", "mbs4", "tokens48", "tokens96", "tokens400", "tp2", "tp2+sp", "pp2", "pp2+vpp2", "cp2", "dp2",
    "dp2+overlap", "dp2+tokens64", "tp2+sp+recompute", "tp2+sp+selective", "tp2+pp2", "tp2+cp2", "pp2+cp2",
    "pp2+vpp2+dp2+tokens64",
]  # fmt: skip
MOE = ["dp2+ep2", "tp2+sp", "tp2+sp+dp2+ep2", "tp2+sp+etp2", "pp2+vpp2"]
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "mbs": "micro_batch_size",
    "tokens": "max_tokens_per_micro_batch",
}
SWITCHES = {
    "sp": ["--sequence_parallel", "true"],
    "recompute": ["--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1"],
    "selective": ["--recompute_granularity", "selective", "--recompute_modules", "core_attn", "mlp"],
    "selective_moe": ["--recompute_granularity", "selective", "--recompute_modules", "moe"],
    "overlap": ["--overlap_grad_reduce", "true"],
    "elementwise": ["--recompute_elementwise", "true"],
    "cpu_adam": ["--optimizer_cpu_offload", "true", "--use_distributed_optimizer", "false"],
    "permute": ["--moe_permute_fusion", "true"],
    "last1": ["--decoder_last_pipeline_num_layers", "1"],
    "uneven_vpp": ["--pipeline_model_parallel_layout", "E|t|tt|tL"],  # of models with four layers
    "shared": ["--share_prompts", "true"],
    "overlap_param": ["--overlap_grad_reduce", "true", "--overlap_param_gather", "true"],
}


@dataclass(frozen=True)
class Variant:
    """A layout and its switches, by name."""

    name: str
    sizes: dict[str, int]
    switches: tuple[str, ...]

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Return the variant of this name, for example tp2+sp; "one" is one rank."""
        sizes: dict[str, int] = {}
        switches: list[str] = []
        for part in [] if name == "one" else name.split("+"):
            match = re.fullmatch(r"(tp|pp|cp|dp|ep|etp|vpp|mbs|tokens)(\d+)", part)
            if match:
                sizes[match[1]] = int(match[2])
            elif part in SWITCHES:
                switches.append(part)
            else:
                known = "tpN ppN cpN dpN epN etpN vppN mbsN tokensN " + " ".join(SWITCHES)
                raise Refused(f"--layouts {name}: unknown part {part!r}; use {known}")
        return cls(name, sizes, tuple(switches))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.get(kind, 1) for kind in ("tp", "pp", "cp", "dp"))

    def flags(self) -> list[str]:
        """Return the flags of `megatron rlhf` for this layout."""
        flags: list[str] = []
        for kind, flag in SIZES.items():
            if kind in self.sizes:
                flags += [f"--{flag}", str(self.sizes[kind])]
        for switch in self.switches:
            flags += SWITCHES[switch]
        return flags

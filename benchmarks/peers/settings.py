"""Parts that the settings of TRL and verl share: their names, the flags of `megatron rlhf`, and the step. Pure."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

# of the step, as both Megatron trainers compute it
LEARNING_RATE = 1e-6
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0
TEMPERATURE = 1.0
LORA_DROPOUT = 0.0  # ms-swift's default of 0.05 has no effect in its Megatron trainer, and here the default is 0


def split_name(trainer: str, name: str, units: Sequence[str], parts: Iterable[str]) -> tuple[str, int, frozenset[str]]:
    """Return the unit, its number and the parts of a setting such as mbs16+awake."""
    first, *given = name.split("+")
    size, known = re.fullmatch(rf"({'|'.join(units)})([1-9]\d*)", first), list(parts)
    if size is None or set(given) - set(known) or len(set(given)) != len(given):
        expected = " or ".join(f"{unit}N" for unit in units)
        raise SystemExit(f"bench: {trainer} setting {name!r}: expected {expected} and, each at most once, "
                         f"{', '.join(known)}; as in mbs16+awake")  # fmt: skip
    return size[1], int(size[2]), frozenset(given)


@dataclass(frozen=True, slots=True)
class SwiftFlags:
    """The flags of `megatron rlhf` that have a counterpart in TRL and verl; defaults are those of ms-swift."""

    vllm_gpu_memory_utilization: float
    sleep_level: int
    vllm_enforce_eager: bool
    adapters: bool
    lora_rank: int
    lora_alpha: int
    target_modules: tuple[str, ...]

    @classmethod
    def parse(cls, flags: Sequence[str]) -> SwiftFlags:
        """Read the flags; raise SystemExit for one whose counterpart is unknown."""
        parser = _Parser(allow_abbrev=False, add_help=False)
        parser.add_argument("--vllm_gpu_memory_utilization", type=float, default=0.9)
        parser.add_argument("--sleep_level", type=int, choices=[0, 1, 2], default=0)
        parser.add_argument("--vllm_enforce_eager", choices=["true", "false"], default="false")
        parser.add_argument("--tuner_type", choices=["full", "lora"], default="full")
        parser.add_argument("--lora_rank", type=int, default=8)
        parser.add_argument("--lora_alpha", type=int, default=32)
        parser.add_argument("--target_modules", nargs="+", default=["all-linear"])
        args = parser.parse_args(flags)
        return cls(
            args.vllm_gpu_memory_utilization,
            args.sleep_level,
            args.vllm_enforce_eager == "true",
            args.tuner_type == "lora",
            args.lora_rank,
            args.lora_alpha,
            tuple(args.target_modules),
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(f"bench: --flags for TRL or verl: {message}")

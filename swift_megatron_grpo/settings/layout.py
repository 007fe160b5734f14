"""The parallel layout: how the ranks of a run share one model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of every kind of parallelism, under ms-swift's flag names. parallel.py checks them."""

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    microbatch_group_size_per_vp_stage: int | None = None
    sequence_parallel: bool = False
    vllm_tensor_parallel_size: int = 1  # of a vLLM inside the training processes
    first_stage_layers: int | None = None  # None: the same number as the other stages
    last_stage_layers: int | None = None
    stages: str | None = None  # --pipeline_model_parallel_layout; None: stages of equal size
    extra_layers: int = 0  # the embedding and the loss, if they count as layers of their stages

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model."""
        return math.prod(
            (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size)
        )

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.model_parallel

    @property
    def is_positive(self) -> bool:
        """True if no size is 0 or below, as a user may type them."""
        return all(getattr(self, field.name) > 0 for field in fields(self) if field.name.endswith("_parallel_size"))

    def __str__(self) -> str:
        sequence = " with SP" if self.sequence_parallel else ""
        virtual = self.virtual_pipeline_model_parallel_size
        interleaved = f" with VPP {virtual}" if virtual > 1 else ""
        return (
            f"TP {self.tensor_model_parallel_size}{sequence}, PP {self.pipeline_model_parallel_size}{interleaved}, "
            f"CP {self.context_parallel_size}, EP {self.expert_model_parallel_size}, DP {self.data_parallel}"
        )


def parse_stages(layout: str) -> tuple[str, ...]:
    """Return the parts of each stage of --pipeline_model_parallel_layout: one letter each, t for a layer.

    With a virtual pipeline every rank has several stages.
    """
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return tuple(layout.split("|"))

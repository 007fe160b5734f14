"""Muon: megatron-core's optimizer for matrices, with Adam for embeddings, the output layer, norms and biases."""

from __future__ import annotations

from typing import Annotated

from swift_megatron_grpo.settings.flag import Above, AtLeast, Faults, Flags, Range, rule, rule_as_typed
from swift_megatron_grpo.settings.layout import ModelShape

_THIS = "--optimizer muon"


class Muon(Flags):
    """Flags that Muon reads, and those that it excludes; Megatron checks them after the model is built, or never."""

    optimizer: str
    tensor_model_parallel_size: int
    expert_tensor_parallel_size: int
    optimizer_cpu_offload: bool
    use_precision_aware_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    muon_split_qkv: bool
    muon_tp_mode: str
    muon_momentum: Annotated[float, Range(0, 0.9, high=1, below_high=True, why="it would never forget")]
    muon_num_ns_steps: Annotated[int, AtLeast(1, use=5)]
    muon_extra_scale_factor: Annotated[float, Above(0, use=1, why="at 0 no matrix is trained")]

    @rule_as_typed  # ms-swift asserts it without naming the flag
    def every_rank_updates_all_of_a_matrix(self) -> Faults:
        for name in ("overlap_grad_reduce", "overlap_param_gather", "use_precision_aware_optimizer"):
            if self.optimizer == "muon" and getattr(self, name):
                yield (
                    f"--{name} true needs the distributed optimizer, whose shards are no matrices that {_THIS} could "
                    f"orthogonalize; use --{name} false, or --optimizer adam"
                )

    @rule
    def states_stay_on_the_gpu(self) -> Faults:
        if self.optimizer == "muon" and self.optimizer_cpu_offload:
            yield (
                f"--optimizer_cpu_offload true: megatron-core has no {_THIS} on the CPU; use --optimizer_cpu_offload "
                "false, or --optimizer adam"
            )

    @rule
    def updates_do_not_depend_on_the_layout(self) -> Faults:
        if self.optimizer != "muon" or self.muon_tp_mode != "blockwise":
            return
        for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(self, name) > 1:
                yield (
                    f"--muon_tp_mode blockwise with --{name} {getattr(self, name)}: every rank would orthogonalize its "
                    "own shard of a matrix, so that updates depend on the layout; use --muon_tp_mode duplicated"
                )
                return

    @rule
    def query_key_and_value_are_all_of_a_projection(self, shape: ModelShape) -> Faults:
        if self.optimizer == "muon" and self.muon_split_qkv and shape.linear_heads:
            yield (
                "--muon_split_qkv true: megatron-core splits a projection into query, key and value, and this model's "
                "has a gate as well; use --muon_split_qkv false"
            )

"""Corrects the marks of parameters by which Megatron reduces gradients and computes their norm.

`allreduce` False marks an expert's parameter, whose gradient is reduced over the expert-data-parallel ranks instead of
all data-parallel ranks. `tensor_model_parallel` True marks a sharded parameter, which the gradient norm counts on every
tensor-parallel rank instead of one. Some are wrong in a model that mcore-bridge 1.6.5 has built.

Upstream:

* Experts without expert parallelism: megatron-core 0.16.1 to 0.18.2 marks them only if expert parallelism is on; 0.19.2
  does it always. With tensor parallelism and whole experts (--tensor_model_parallel_size 2 and ms-swift's default of 1
  for the two expert sizes) each tensor-parallel rank runs the experts on its own part of the tokens, and the gradients
  of the other ranks are never added. On a small model an expert's gradient was 10 to 25 % of the correct one.
* megatron-core below 0.18 marks the embedding and the output layer only when it initialises them at random.
  mcore-bridge loads weights instead (perform_initialization False), so the norm leaves out all shards but the first:
  7-9 % on a small model.
* Transformer Engine marks the weight of every linear layer. Layers that megatron-core calls "duplicated", such as the
  half of a LoRA adapter that is replicated on every rank, are therefore counted TP times: 14 % on a small model.
  megatron-core 0.17 and newer unmark them. mcore-bridge takes the mark of such a layer for its kind: it gives the
  down-projections of latent attention an adapter for a sharded layer, whose B is then another one on every rank, and
  its gradient that of the rank's own tokens.
* Transformer Engine below 2.13 also marks the weights of experts as sharded, newer versions do not, and megatron-core
  does only from 0.19 on. With megatron-core 0.16 to 0.18 and Transformer Engine 2.13 or newer the norm leaves out the
  experts of all tensor-parallel ranks but the first.

Fix: mark experts before the models are wrapped in DDP, which sorts parameters into buffers by it. Set the other marks
before adapters are added, and again before the optimizer copies them to its own shards. Where upstream is right they
stay as they are.

Tests: tests/unit/training/upstream_fixes/test_upstream_marks.py names the version that sets each mark, and fails if
another one does; a part can go once no supported version needs it. Without the fix, in tests/dist, test_layouts.py
[moe-full-tp2+sp], [dense-full-tp2] and [dense-lora-tp2+sp] and test_newer_transformer_engine.py fail; if it comes after
the adapters, test_composite_layouts.py[deepseek-lora-tp2+sp].
"""

from collections.abc import Iterable

import torch
from mcore_bridge import LoraParallelLinear
from megatron.core import mpu
from megatron.core.extensions.transformer_engine import TEGroupedLinear, TELinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def mark_experts(models: Iterable[torch.nn.Module]) -> None:
    """Mark the parameters of all experts in `models`, which must not be wrapped in DDP yet."""
    if mpu.get_expert_tensor_parallel_world_size() == mpu.get_tensor_model_parallel_world_size():
        return  # without expert parallelism the two groups are the same; with it upstream's marks are right
    for model in models:
        for name, module in model.named_modules():
            # A layer's experts are one module or a list of modules; adapters are modules of the same kind inside them.
            if isinstance(module, TEGroupedLinear) or ".local_experts." in name:
                for parameter in module.parameters():
                    parameter.allreduce = False


def mark_sharded_parameters(models: Iterable[torch.nn.Module]) -> None:
    """Set the tensor-parallel marks of all parameters in `models`, before the optimizer is built."""
    for model in models:
        # Experts are sharded by expert parallelism: each is on one rank, whatever its layer is called.
        experts = {
            part
            for module in model.modules()
            if isinstance(module, LoraParallelLinear) and module.is_expert
            for part in module.modules()
        }
        for module in model.modules():
            if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)):
                _mark(module, sharded=True, dim=0)
            elif isinstance(module, RowParallelLinear):
                _mark(module, sharded=True, dim=1)
            elif type(module) is TELinear and module not in experts:  # "duplicated"; its subclasses are sharded
                _mark(module, sharded=False, dim=-1)
            elif isinstance(module, TEGroupedLinear):
                for name, weight in module.named_parameters(recurse=False):
                    if name.startswith("weight"):
                        weight.tensor_model_parallel = True


def _mark(module: torch.nn.Module, sharded: bool, dim: int) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias" and dim == 1:
            continue  # the bias of a row-parallel layer is replicated, as it is marked
        parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]
        parameter.partition_dim = dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]

"""A model of two tensor-parallel workers with layers that quantize online, as those of vLLM 0.25.1 do.

The methods below follow Fp8PtpcOnlineLinearMethod and Fp8PtpcOnlineMoEMethod of vLLM, with torch in place of kernels;
the bookkeeping of layers that are loaded again is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing, record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

HIDDEN, FFN, EXPERT_FFN, VOCABULARY, EXPERTS = 16, 24, 6, 10, 3
WORKERS = 2
Weights = dict[str, torch.Tensor]


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in 8 bits, and the scale of each."""
    scale = weight.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


class LinearMethod(QuantizeMethodBase):
    uses_meta_device = True

    def create_weights(self, layer: Any, rows: int, columns: int, loader: Any) -> None:  # type: ignore[override]
        weight = torch.nn.Parameter(torch.empty(rows, columns, device="meta", dtype=torch.bfloat16), False)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, {"weight_loader": loader})
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer.input_scale = None
        weight, scale = quantized(layer.weight)
        replace_parameter(layer, "weight", weight.t())
        replace_parameter(layer, "weight_scale", scale)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class ExpertsMethod(QuantizeMethodBase):
    uses_meta_device = True

    def __init__(self) -> None:
        self.moe_quant_config: Any = None
        self.moe_kernel: Any = None

    def create_weights(self, layer: Any, experts: int, ffn: int, loader: Any) -> None:  # type: ignore[override]
        for name, shape in (("w13_weight", (experts, 2 * ffn, HIDDEN)), ("w2_weight", (experts, HIDDEN, ffn))):
            weight = torch.nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16), False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, {"weight_loader": loader})
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        ffn = layer.w2_weight.shape[2]
        for begin in (0, ffn):  # as Fp8PerBlockOnlineMoEMethod zeroes the padding
            layer.w13_weight[:, begin + layer.size : begin + ffn] = 0
        layer.w2_weight[:, :, layer.size :] = 0
        for name in ("w13_weight", "w2_weight"):
            weight, scale = quantized(getattr(layer, name))
            replace_parameter(layer, name, weight)
            replace_parameter(layer, f"{name}_scale", scale)
        self.moe_quant_config = SimpleNamespace(scales=[layer.w13_weight_scale, layer.w2_weight_scale])
        strides = torch.full((EXPERTS,), layer.w2_weight.shape[2], dtype=torch.int64)
        # the experts' kernel holds what is no parameter, and what a first batch allocates
        experts = SimpleNamespace(quant_config=self.moe_quant_config, strides=strides, scratch=None)
        self.moe_kernel = SimpleNamespace(impl=SimpleNamespace(fused_experts=experts))
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class FusedLinear(torch.nn.Module):
    """Sent tensors below each other, each sharded by rows over the workers."""

    def __init__(self, worker: int, sizes: dict[str, int], columns: int, bias: bool = False) -> None:
        super().__init__()
        self.worker, self.sizes = worker, sizes  # rows of a worker
        self.quant_method = LinearMethod()
        self.quant_method.create_weights(self, sum(sizes.values()), columns, self.load)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(sum(sizes.values()), dtype=torch.bfloat16), False)
            set_weight_attrs(self.bias, {"weight_loader": self.load})

    def load(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, shard_id: str) -> None:
        begin = sum(size for name, size in self.sizes.items() if name < shard_id)
        rows = self.sizes[shard_id]
        param.data.narrow(0, begin, rows).copy_(loaded_weight.narrow(0, self.worker * rows, rows))


class RowLinear(torch.nn.Module):
    """One sent tensor, sharded by columns."""

    def __init__(self, worker: int, rows: int, columns: int) -> None:
        super().__init__()
        self.worker = worker
        self.quant_method = LinearMethod()
        self.quant_method.create_weights(self, rows, columns, self.load)

    def load(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        columns = param.shape[1]
        param.data.copy_(loaded_weight.narrow(1, self.worker * columns, columns))


class Experts(torch.nn.Module):
    """gate and up in w13, down in w2, of all experts; `padding` more rows and columns than are loaded."""

    def __init__(self, worker: int, padding: int, parallel: bool) -> None:
        super().__init__()
        self.worker, self.parallel = worker, parallel  # whole experts, 2 and 1, instead of shards of all
        self.quant_method = ExpertsMethod()
        local = (2, 1)[worker] if parallel else EXPERTS
        self.size = EXPERT_FFN if parallel else EXPERT_FFN // WORKERS
        self.quant_method.create_weights(self, local, self.size + padding, self.load)

    def load(
        self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        dimension, size = 1 if shard_id == "down" else 0, self.size
        if self.parallel:
            local = expert_id - 2 * self.worker
            if not 0 <= local < param.shape[0]:
                return
            part, expert = loaded_weight, param.data[local]
        else:
            part, expert = loaded_weight.narrow(dimension, self.worker * size, size), param.data[expert_id]
        begin = expert.shape[0] // 2 if shard_id == "up" else 0
        expert.narrow(dimension, begin, size).copy_(part)


class Block(torch.nn.Module):
    def __init__(self, worker: int, padding: int, parallel: bool) -> None:
        super().__init__()
        self.qkv = FusedLinear(worker, {"k": 2, "q": 8, "v": 2}, HIDDEN, bias=True)  # fewer keys than queries
        self.o = RowLinear(worker, HIDDEN, HIDDEN // WORKERS)
        self.gate_up = FusedLinear(worker, {"gate": FFN // WORKERS, "up": FFN // WORKERS}, HIDDEN)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = Experts(worker, padding, parallel)


class OnlineModel(torch.nn.Module):
    def __init__(self, worker: int = 0, padding: int = 0, parallel: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.head = self.embedding  # tied
        self.blocks = torch.nn.ModuleList(Block(worker, padding, parallel) for _ in range(2))
        self.requires_grad_(False)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            block, _, rest = name.rpartition(".")
            kind, expert = rest.split("@") if "@" in rest else (rest, "")
            if expert:
                parameter = parameters[f"{block}.experts.{'w2' if kind == 'down' else 'w13'}_weight"]
                parameter.weight_loader(parameter, tensor, name, shard_id=kind, expert_id=int(expert))
            elif kind in ("q", "k", "v", "gate", "up"):
                fused = "qkv" if kind in "qkv" else "gate_up"
                parameter = parameters[f"{block}.{fused}.{'weight' if tensor.ndim == 2 else 'bias'}"]
                parameter.weight_loader(parameter, tensor, kind)
            elif kind == "bias_q":
                self._load_bias(parameters[f"{block}.qkv.bias"], tensor)
            elif kind == "o":
                parameters[f"{block}.o.weight"].weight_loader(parameters[f"{block}.o.weight"], tensor)
            elif kind == "router":
                default_weight_loader(parameters[f"{block}.router.weight"], tensor)
            else:
                default_weight_loader(parameters["embedding.weight"], tensor)
        return set()

    @staticmethod
    def _load_bias(parameter: Any, tensor: torch.Tensor) -> None:
        for shard, rows in zip("kqv", tensor.split([4, 16, 4]), strict=True):
            parameter.weight_loader(parameter, rows, shard)


def tensors(seed: int = 0) -> Weights:
    """Return the weights that a trainer sends."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, HIDDEN)}
    for block in ("blocks.0", "blocks.1"):
        shapes |= {f"{block}.q": (16, HIDDEN), f"{block}.k": (4, HIDDEN), f"{block}.v": (4, HIDDEN)}
        shapes |= {f"{block}.bias_q": (24,), f"{block}.o": (HIDDEN, HIDDEN), f"{block}.router": (EXPERTS, HIDDEN)}
        shapes |= {f"{block}.gate": (FFN, HIDDEN), f"{block}.up": (FFN, HIDDEN)}
        for expert in range(EXPERTS):
            shapes |= {f"{block}.{kind}@{expert}": (EXPERT_FFN, HIDDEN) for kind in ("gate", "up")}
            shapes[f"{block}.down@{expert}"] = (HIDDEN, EXPERT_FFN)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def fresh(weights: Weights, worker: int = 0, padding: int = 0, parallel: bool = False) -> OnlineModel:
    """Return a model that vLLM's own loading has filled, as at the start of an engine."""
    model = OnlineModel(worker, padding, parallel)
    model.load_weights(iter(weights.items()))
    finalize_layerwise_processing(model, None)
    return model


def held_memory(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that kernels read, also those that are no parameters."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield f"{name}.strides", module.quant_method.moe_kernel.impl.fused_experts.strides

"""Transformer Engine's module tree, built from the files of this folder and installed in sys.modules.

Called by `activate()`. Some modules of Transformer Engine are omitted on purpose: without them megatron-core uses its
own implementation, which is the right one on a CPU. These are cpp_extensions (fused GEMM), graph (CUDA graphs),
cpu_offload and float8_tensor.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from swift_megatron_grpo.platforms.cpu.stand_in import NEEDS_CUDA, module_tree, unsupported
from swift_megatron_grpo.platforms.cpu.transformer_engine import attention, base, layers, optimizers, permutation

NAME = "transformer_engine"
# megatron-core and mcore-bridge read transformer_engine.__version__. The GPU stack runs 2.11, so both platforms use the
# same code paths. The highest version they compare with is 2.10. From 2.7 on megatron-core imports the fused router
# unconditionally, so its names exist below.
VERSION = "2.11.0"

_RECIPES = ("CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling",
            "NVFP4BlockScaling", "Recipe")  # fmt: skip
_ACTIVATIONS = ("GEGLU", "GELU", "ReGLU", "ReLU", "SiLU", "SwiGLU")
_LAYERS_WITHOUT_CPU = ("Fp8Padding", "Fp8Unpadding", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
_OPS = ("AllReduce", "BasicLinear", "Bias", "FusibleOperation", "LayerNorm", "RMSNorm", "ReduceScatter", "Sequential")
_PERMUTATIONS = ("moe_permute", "moe_permute_with_probs", "moe_sort_chunks_by_index",
                 "moe_sort_chunks_by_index_with_probs", "moe_unpermute")  # fmt: skip
_ROUTER = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")


def _stubs(module: str, *names: str) -> dict[str, Any]:
    return {name: unsupported(f"{NAME}.{module}", name) for name in names}


def _contents() -> dict[str, dict[str, Any]]:
    """Return the names of every module, by its path below transformer_engine."""
    fp8_contexts = {"fp8_autocast": base.fp8_autocast, "fp8_model_init": base.fp8_model_init}
    fp8 = {"FP8GlobalStateManager": base.FP8GlobalStateManager, **fp8_contexts}
    layer_names = ("GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm")
    modules = {name: getattr(layers, name) for name in layer_names}
    optimizer_names = ("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
    tracker = {"CudaRNGStatesTracker": base.CudaRNGStatesTracker}
    return {
        "common": {},
        "common.recipe": {"Format": base.Format, **_stubs("common.recipe", *_RECIPES)},
        "pytorch": {
            **modules,
            **tracker,
            **fp8_contexts,
            "DotProductAttention": attention.DotProductAttention,
            **_stubs("pytorch", *_LAYERS_WITHOUT_CPU, "Float8BlockwiseQTensor"),  # imported for each weight
        },
        "pytorch.attention": {"DotProductAttention": attention.DotProductAttention},
        "pytorch.attention.rope": _stubs(
            "pytorch.attention.rope", "apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"
        ),
        "pytorch.cross_entropy": _stubs("pytorch.cross_entropy", "parallel_cross_entropy"),
        # Megatron calls these two with fp8 only; tensor_parallel.checkpoint recomputes otherwise
        "pytorch.distributed": {
            **tracker,
            **_stubs("pytorch.distributed", "activation_recompute_forward", "checkpoint"),
        },
        "pytorch.fp8": fp8,
        "pytorch.module": modules,
        "pytorch.module.base": {
            "TransformerEngineBaseModule": base.TransformerEngineBaseModule,
            "_dummy_wgrads": {},
            **_stubs("pytorch.module.base", "get_dummy_wgrad", "initialize_ub"),
        },
        "pytorch.ops": _stubs("pytorch.ops", *_OPS, *_ACTIVATIONS),
        "pytorch.optimizers": {name: getattr(optimizers, name) for name in optimizer_names},
        "pytorch.permutation": {name: getattr(permutation, name) for name in _PERMUTATIONS},
        "pytorch.quantization": fp8,
        "pytorch.router": _stubs("pytorch.router", *_ROUTER),
        "pytorch.tensor": _stubs("pytorch.tensor", "QuantizedTensor"),
        "pytorch.utils": _stubs("pytorch.utils", "SplitAlongDim"),
    }


class _StandInModule(ModuleType):
    """A module whose missing names raise an error that mentions the stand-in."""

    def __getattr__(self, name: str) -> Any:
        is_special = name.startswith("__")  # the import system reads these
        raise AttributeError(name if is_special else _missing_message(f"{self.__name__}.{name}"))


class _MissingSubmoduleFinder:
    """Last finder of sys.meta_path: raises ImportError with the reason for modules that are not in the tree."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith(f"{NAME}."):
            raise ImportError(_missing_message(name), name=name)


def _missing_message(name: str) -> str:
    return f"{name} is not part of the CPU platform's stand-in ({NEEDS_CUDA})"


def install() -> None:
    """Install the tree. An installed Transformer Engine is hidden: it cannot be imported without CUDA."""
    if NAME in sys.modules:
        raise RuntimeError(f"{NAME} is already imported; activate the CPU platform before importing it")
    root = _StandInModule(NAME)
    vars(root)["__version__"] = VERSION
    sys.modules.update(module_tree(root, _contents()))
    sys.meta_path.append(_MissingSubmoduleFinder())

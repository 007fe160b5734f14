"""Makes Megatron's optimizer with states on the CPU (--optimizer_cpu_offload) start from weights that are loaded late.

megatron-core 0.16.1 copies the weights when it builds the optimizer. When a checkpoint in Megatron's format is loaded
afterwards (--mcore_model), `reload_model_params` updates neither the fp32 weights of the distributed optimizer nor
their copies on the CPU, so the first step writes the weights from before the load back into the model.
"""

from __future__ import annotations

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def copy_loaded_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the model's weights to every place where an optimizer with states on the CPU keeps them."""
    for link in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        hybrid = link.optimizer
        if not isinstance(hybrid, HybridDeviceOptimizer):
            continue
        link.optimizer = None  # Megatron skips its own copy if it finds this optimizer
        try:
            link.reload_model_params()
        finally:
            link.optimizer = hybrid
        hybrid.update_fp32_param_by_new_param()
        for parameter, on_cpu in hybrid.gpu_params_map_cpu_copy.items():
            on_cpu.data.copy_(parameter)

"""Mends checkpoints of runs with --optimizer_cpu_offload; megatron-core 0.16.1.

* Weights that are loaded late: Megatron copies the weights when it builds the optimizer. When a checkpoint in its own
  format is loaded afterwards (--mcore_model), `reload_model_params` updates neither the fp32 weights of the distributed
  optimizer nor their copies on the CPU, so the first step writes the weights from before the load back into the model.
* Classes in checkpoints: the settings of every group of parameters contain the classes of the two optimizers, which are
  saved, and which torch refuses to load, so that nothing of the checkpoint can be loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

_CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")


@contextmanager
def loading(optimizer: MegatronOptimizer, with_states: bool) -> Iterator[None]:
    """Load a checkpoint within this context, and save others later. `with_states`: it loads the optimizer's too."""
    links = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    links = [link for link in links if isinstance(link.optimizer, HybridDeviceOptimizer)]
    for link in links:
        for group in link.optimizer.param_groups:
            for name in _CLASSES:  # the optimizer itself reads them from its attributes
                group.pop(name, None)
    yield
    if not with_states:
        for link in links:
            _copy_weights(link)


def _copy_weights(link: MegatronOptimizer) -> None:
    """Copy the model's weights to every place where this optimizer keeps them."""
    hybrid = link.optimizer
    if isinstance(link, MixedPrecisionOptimizer):
        link.optimizer = None  # Megatron skips its own copy if it finds this optimizer
        try:
            link._copy_model_params_to_main_params()
        finally:
            link.optimizer = hybrid
    hybrid.update_fp32_param_by_new_param()
    for parameter, on_cpu in hybrid.gpu_params_map_cpu_copy.items():
        on_cpu.data.copy_(parameter)

"""Lets verl 0.9.1 run where the benchmark runs. verl imports it in each of its processes: VERL_USE_EXTERNAL_MODULES.

The log-probs. verl computes them with the cross entropy of flash-attn, a Triton kernel, and without flash-attn in a
loop over tokens. flash-attn has no build for these machines, but the kernel's file needs none: it comes unchanged, as
the module flash_attn_cross_entropy.

Runs side by side. verl sends weights to vLLM through a socket in /tmp that it names after the id of the Ray job, which
differs between jobs of one Ray cluster. A run of the benchmark starts a cluster of its own, and the first job of every
cluster has the same id: a run would remove the socket of the other one. Here the id has the port of the cluster too.
"""

from __future__ import annotations

from ray.runtime_context import RuntimeContext
from verl.utils import torch_functional

_job_of_ray = RuntimeContext.get_job_id


def _job_and_port(context: RuntimeContext) -> str:
    return f"{_job_of_ray(context)}-{context.gcs_address.rpartition(':')[2]}"


RuntimeContext.get_job_id = _job_and_port

if not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
    from flash_attn_cross_entropy import cross_entropy_loss

    torch_functional.cross_entropy_loss = cross_entropy_loss
    torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True

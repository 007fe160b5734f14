"""What runs in each of vLLM's workers, which may be processes of their own: it receives weights and loads them.

vLLM imports this file by its path before it loads the model, and mixes the class into its own worker.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import finish_vllm_weight_reload, patch_vllm_moe_model_weight_loader
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from swift_megatron_grpo.vllm_adapter import load_adapter
from swift_megatron_grpo.weights.buckets import unpack
from swift_megatron_grpo.weights.channel import Channel, Rendezvous

if current_platform.is_cpu():
    from swift_megatron_grpo.platforms.cpu import activate_engine

    activate_engine()


class WeightReceiver(WeightSyncWorkerExtension):
    """ms-swift's methods for ms-swift's routes, and these for ours. Attributes of the worker are at hand."""

    grpo_channel: Channel | None = None

    def grpo_join(self, rendezvous: dict[str, Any]) -> None:
        """Meet the trainer, which is rank 0. A group of before belongs to a trainer that is gone."""
        self.grpo_leave()
        parallel = self.vllm_config.parallel_config
        before = parallel.data_parallel_index * parallel.tensor_parallel_size
        rank = 1 + before + get_tensor_model_parallel_rank()
        self.grpo_channel = Channel(Rendezvous(**rendezvous), rank, torch.device(self.device))

    def grpo_leave(self) -> None:
        if self.grpo_channel is not None:
            self.grpo_channel.close()
            self.grpo_channel = None

    def grpo_receive(self, lora: bool) -> dict[str, Any]:
        """All weights of the model, or with `lora` those of an adapter on the checkpoint that the model is."""
        try:
            return self._grpo_receive(lora)
        except BaseException:
            self.grpo_leave()  # so that the trainer, which is sending, notices
            raise

    def _grpo_receive(self, lora: bool) -> dict[str, Any]:
        assert self.grpo_channel is not None, "no trainer has joined this server"
        began, tensors, received = time.monotonic(), 0, 0
        model = self.model_runner.model
        patch_vllm_moe_model_weight_loader(model)
        of_adapter: dict[str, torch.Tensor] = {}
        while True:
            header, data = self.grpo_channel.receive()
            if header.get("end"):
                break
            weights = unpack(header, data)
            if lora:
                of_adapter.update(weights)
            else:
                model.load_weights(weights)
            tensors, received = tensors + len(weights), received + data.numel()
        if lora:
            load_adapter(self, header["adapter"], of_adapter)
        else:
            finish_vllm_weight_reload(model, self.model_runner.model_config, self.device, strict=True)
        return {"tensors": tensors, "bytes": received, "seconds": time.monotonic() - began}

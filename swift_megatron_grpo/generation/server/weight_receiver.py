"""Extension of vLLM's workers, to whose bases vLLM adds it by its dotted path: loads weights, and counts drafts."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rlhf_trainers.utils import finish_vllm_weight_reload, patch_vllm_moe_model_weight_loader
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from swift_megatron_grpo.generation.vllm import adapter, cuda_runtime, deepstack, fast_logprobs, position_noise
from swift_megatron_grpo.generation.vllm.second_runner import draft_in_second_runner, drafter_of
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.load.quantization import layers_that_quantize
from swift_megatron_grpo.weights.transport.buckets import unpack
from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

cuda_runtime.find_runtime_beside_tilelang()  # before a worker imports FlashInfer
fast_logprobs.speed_up_logprobs()
position_noise.sample_by_position()
deepstack.skip_features_of_missing_tower()
draft_in_second_runner()
if current_platform.is_cpu():
    from swift_megatron_grpo.platforms.cpu import activate_engine

    activate_engine()


class WeightReceiver(WeightSyncWorkerExtension):
    """ms-swift's extension, and methods for this package's routes. Attributes of the worker are available on self."""

    grpo_channel: Channel | None = None
    grpo_loaded_weights: LoadedWeights | None = None

    def grpo_join(self, rendezvous: dict[str, Any]) -> None:
        """Join the group of the trainer, its rank 0, and close an earlier group: its trainer has left."""
        self.grpo_leave()
        parallel = self.vllm_config.parallel_config
        offset = parallel.data_parallel_index * parallel.tensor_parallel_size
        rank = 1 + offset + get_tensor_model_parallel_rank()
        self.grpo_channel = Channel(Rendezvous(**rendezvous), rank, torch.device(self.device))

    def grpo_leave(self) -> None:
        if self.grpo_channel is not None:
            self.grpo_channel.close()
            self.grpo_channel = None

    def grpo_receive(self, lora: bool, collect_checksums: bool) -> None:
        """Receive and load all weights of the model, or with `lora` an adapter on the loaded checkpoint."""
        assert self.grpo_channel is not None, "no trainer has joined this server"
        stream = _WeightStream(self.grpo_channel)
        try:
            if lora:
                tensors = dict(stream)
                assert stream.adapter is not None, "the trainer sent an adapter without its configuration"
                adapter.load_adapter(self, stream.adapter, tensors)
            else:
                runner = self.model_runner
                patch_vllm_moe_model_weight_loader(runner.model)
                finish = partial(finish_vllm_weight_reload, runner.model, runner.model_config, self.device, strict=True)
                self._grpo_loaded_weights().load(stream, finish, collect_checksums)
        except BaseException:
            self.grpo_leave()  # so that the trainer's send fails as well
            raise

    def grpo_held_weights(self) -> dict[str, Any]:
        return self._grpo_loaded_weights().worker_weights().to_json()

    def grpo_draft(self) -> None:
        drafter_of(self).follow(self.model_runner, remembers=True)

    def grpo_take_draft_counts(self) -> dict[str, int]:
        return asdict(drafter_of(self).take_counts())

    def _grpo_loaded_weights(self) -> LoadedWeights:
        if self.grpo_loaded_weights is None:
            runner = self.model_runner
            layers = layers_that_quantize(runner.model, self.vllm_config)
            engine = ""  # the trainer names it
            self.grpo_loaded_weights = LoadedWeights(runner.model, runner.model_config.dtype, engine, layers)
        return self.grpo_loaded_weights


class _WeightStream:
    """Tensors with their names, bucket by bucket, as the trainer sends them. Can be iterated once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.adapter: dict[str, Any] | None = None  # its configuration, once all tensors have arrived

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            header, data = self._channel.receive()
            if header.get("end"):
                self.adapter = header["adapter"]
                return
            yield from unpack(header, data)

"""The faults of upstream that the CPU platform fixes, in the real packages, one test per fault.

All checks run in one separate process, because it imports megatron-core, mcore-bridge and vLLM and changes their global
state. It reports which checks failed and why. This file is also the script of that process.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from pathlib import Path
from types import FunctionType

import pytest

from tests.forking.client import run_script


def check_megatron_and_the_bridge_use_the_stand_in() -> None:
    import mcore_bridge  # noqa: F401
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as extensions
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER

    assert utils.is_te_min_version("2.10.0") and gpt_layer_specs.HAVE_TE and not USING_PYTORCH_OPTIMIZER
    # megatron-core must use its own implementations, because the stand-in has no fused ones.
    assert extensions.te_general_gemm is None and extensions.get_cpu_offload_context is None
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and os.environ["TORCHDYNAMO_DISABLE"] == "1"


def check_fused_functions_are_not_compiled() -> None:
    from megatron.core import jit
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    assert jit.jit_fuser is jit.noop_decorator
    for function in (swiglu, topk_routing_with_score_function):
        assert type(function) is FunctionType and not hasattr(function, "_torchdynamo_orig_callable")


def check_every_optimizer_accepts_cpu_parameters() -> None:
    """Megatron compares types with "torch.cuda.FloatTensor" in its fp32, 16-bit and distributed optimizers."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(4, 4, dtype=config.params_dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    precision_aware = dict(use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16)
    for bf16, sharded, more in (
        (False, False, {}),
        (True, False, {}),
        (False, True, {}),
        (True, True, {}),
        (True, True, precision_aware),
    ):
        dtype = torch.bfloat16 if bf16 else torch.float32
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=bf16, params_dtype=dtype)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
        model = DistributedDataParallel(config, ddp, Model(config))
        settings = OptimizerConfig(
            optimizer="adam", lr=0.1, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=sharded, **more
        )
        optimizer = get_megatron_optimizer(settings, [model])
        weight = model.module.linear.weight
        before = weight.detach().clone()
        model.zero_grad_buffer()
        model(torch.ones(2, 4, dtype=dtype)).float().sum().backward()
        model.finish_grad_sync()
        success, norm, _ = optimizer.step()
        assert success and norm > 0
        assert not torch.equal(weight, before), (bf16, sharded, more)


def check_the_rng_tracker_is_seeded() -> None:
    """mcore_bridge.set_random_seed seeds it only if torch.cuda.device_count() > 0."""
    from mcore_bridge import set_random_seed
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().reset()
    set_random_seed(42)
    assert set(get_cuda_rng_tracker().get_states()) == {
        "data-parallel-rng",
        "model-parallel-rng",
        "expert-parallel-rng",
    }


def check_forking_the_tracker_does_not_warn() -> None:
    import torch
    from mcore_bridge import set_random_seed
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addHandler(handler)
    set_random_seed(42)
    with get_cuda_rng_tracker().fork():
        torch.rand(1)
    logger.warning("another message")
    assert [record.getMessage() for record in records] == ["another message"]


def check_split_sizes_are_numpy_arrays() -> None:
    """all_to_all_single rejects tensors as split sizes; on a GPU Megatron converts them while it moves them."""
    import numpy
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    sizes = torch.tensor([3, 1])
    assert isinstance(token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True), numpy.ndarray)
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def check_vision_towers_use_sdpa() -> None:
    from mcore_bridge import ModelConfig, hf_to_mcore_config
    from transformers import Qwen3Config

    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    hf_config = Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"])
    arguments = dict(hf_to_mcore_config(hf_config), hf_config=hf_config)
    assert ModelConfig(**arguments).vit_attn_impl == "sdpa"
    assert ModelConfig(**arguments, vit_attn_impl="eager").vit_attn_impl == "eager"


def check_recompute_works_with_the_te_rng_tracker() -> None:
    """With `--te_rng_tracker` Megatron reads graph-safe states, which a CPU generator does not have."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    random.model_parallel_cuda_manual_seed(7, te_rng_tracker=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(64, requires_grad=True)
    y = tensor_parallel.checkpoint(block, False, x)
    torch.rand(3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    random.initialize_rng_tracker(force_reset=True)


def check_vllm_uses_reloaded_weights() -> None:
    """vLLM's CPU kernels use a packed copy of the weight and drop the weight itself."""
    import torch
    from vllm.model_executor.layers import utils

    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layer.weight.data.copy_(torch.eye(64))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), x)


def check_vllm_sums_the_experts_of_all_workers() -> None:
    """vLLM's kernel takes the ids of a whole layer for those of a worker's own experts, and reads beyond them."""
    from types import SimpleNamespace

    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    torch.manual_seed(0)
    hidden, up, down = torch.randn(5, 64), torch.randn(4, 128, 64) / 8, torch.randn(4, 64, 64) / 8
    weights, ids = torch.rand(5, 2), torch.stack([torch.randperm(4)[:2] for _ in range(5)]).to(torch.int32)
    layer = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")

    def run(held: slice, expert_map: torch.Tensor | None) -> torch.Tensor:
        output = torch.zeros(5, 64)
        packed = [cpu_moe.cpu_prepack_moe_weight(weight[held].contiguous(), "vec") for weight in (up, down)]
        experts.apply(
            layer, output=output, hidden_states=hidden, w1=packed[0], w2=packed[1], topk_weights=weights, topk_ids=ids,
            activation=MoEActivation.SILU, global_num_experts=4, expert_map=expert_map, a1q_scale=None, a2_scale=None,
            workspace13=output, workspace2=output, expert_tokens_meta=None, apply_router_weight_on_input=False,
        )  # fmt: skip
        return output

    first = run(slice(0, 2), torch.tensor([0, 1, -1, -1], dtype=torch.int32))
    second = run(slice(2, 4), torch.tensor([-1, -1, 0, 1], dtype=torch.int32))
    torch.testing.assert_close(first + second, run(slice(0, 4), None))
    assert first.abs().sum() > 0 and second.abs().sum() > 0


def check_rows_of_drafts_get_the_settings_of_their_requests() -> None:
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    for dtype in (torch.float32, torch.int32, torch.int64):
        ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second request has no draft
        found = expand_batch_to_tokens(torch.tensor([0, 7, 3], dtype=dtype), ends, 5, replace_from=0, replace_to=1)
        assert found.dtype == dtype and found.tolist() == [1, 1, 3, 3, 3]


def check_vllm_allocates_the_cache_that_is_set() -> None:
    from vllm.config import CacheConfig, VllmConfig

    def cache_bytes(**settings: int) -> int | None:
        return VllmConfig(cache_config=CacheConfig(**settings)).cache_config.kv_cache_memory_bytes

    assert (cache_bytes(kv_cache_memory_bytes=2**26), cache_bytes()) == (2**26, 2**30)


def check_vllm_exits_after_the_groups_are_destroyed() -> None:
    """The last check: destroys all process groups, as ms-swift does after training; vLLM then cleans up at exit."""
    import torch.distributed as dist
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1, backend="gloo")
    dist.destroy_process_group()
    parallel_state.cleanup_dist_env_and_memory()


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return json.loads(run_script(Path(__file__), kind="upstream").splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_upstream_fault_is_fixed(failures: dict[str, str], check: str) -> None:
    assert check not in failures, failures[check]


def main() -> None:
    from swift_megatron_grpo.platforms.cpu import activate

    activate()
    import torch.distributed as dist

    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    assert dist.get_backend() == "gloo"
    from megatron.core import mpu

    mpu.initialize_model_parallel()
    failures = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures), flush=True)


if __name__ == "__main__":
    main()

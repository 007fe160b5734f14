"""Names of megatron-core, Transformer Engine's callers and vLLM that moved between supported versions, or may move.

One test per adapter or fix of this package. A test whose name says "below" or "from" compares with the installed
version: if it fails, upstream has changed, and docs/versions.md is wrong.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from packaging.version import Version

from swift_megatron_grpo.packing.plan import zigzag_positions
from swift_megatron_grpo.training.stage_shapes import SENDS_END_BEFORE_MEMORY_IS_FREED
from tests.support.interpreter import result_of


@cache
def upstream() -> dict[str, Any]:
    result: dict[str, Any] = result_of(
        """
        import importlib, importlib.metadata
        import megatron.core
        import torch
        from megatron.core import jit, optimizer as optimizers, parallel_state, utils
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads, param_and_grad_buffer
        from megatron.core.extensions import transformer_engine as extensions
        from megatron.core.fusions import fused_bias_swiglu
        from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank
        from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import p2p_communication, schedules
        from megatron.core.tensor_parallel import get_cuda_rng_tracker, param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer import mlp
        from megatron.core.transformer.moe import experts, moe_layer, moe_utils, router, token_dispatcher
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if hasattr(moe_utils, "get_moe_metrics_tracker"):
            report = moe_utils.get_moe_metrics_tracker().report
        else:
            report = moe_utils.track_moe_metrics
        tracker = get_cuda_rng_tracker()
        result = {
            "megatron.core": megatron.core.__version__,
            "distribution": importlib.metadata.version("megatron-core"),
            "parallel_state": sorted(vars(parallel_state)),
            "destroy": source(parallel_state.destroy_model_parallel),
            "distributed_optimizer": source(distrib_optimizer.DistributedOptimizer),
            "optimizer": source(optimizer),
            "optimizers": source(optimizers),
            "adam_of_optimizer": distrib_optimizer.Adam.__name__,
            "clip_grads": sorted(vars(clip_grads)),
            "loops_used": clip_grads.multi_tensor_applier is utils.local_multi_tensor_applier,
            "report": parameters(report),
            "has_tracker": hasattr(moe_utils, "get_moe_metrics_tracker"),
            "duplicate": source(param_is_not_tensor_parallel_duplicate),
            "grouped": source(extensions.TEGroupedLinear.__init__),
            "grouped_forward": source(extensions.TEGroupedLinear.forward),
            "buffer": source(param_and_grad_buffer),
            "swiglu": fused_bias_swiglu.SwiGLUFunction.__name__,
            "weighted_swiglu": parameters(fused_bias_swiglu.WeightedSwiGLUFunction.forward),
            "weighted_swiglu_gradients": source(fused_bias_swiglu.WeightedSwiGLUFunction.backward),
            "weighted_swiglu_caller": source(fused_bias_swiglu.weighted_bias_swiglu_impl),
            "weighted_swiglu_callers": [source(module) for module in (experts, mlp)],
            "dispatcher": source(token_dispatcher.MoEAlltoAllTokenDispatcher),
            "moe_layer": source(moe_layer),
            "p2p_ops": parameters(p2p_communication._p2p_ops),
            "communicate": source(p2p_communication.P2PCommunicator._communicate),
            "communicate_shapes": parameters(p2p_communication.P2PCommunicator._communicate_shapes),
            "schedule_table": parameters(schedules.get_schedule_table),
            "schedules": source(schedules),
            "move": parameters(token_dispatcher.maybe_move_tensor_to_cpu),
            "disable_jit_fuser": parameters(jit.disable_jit_fuser),
            "finalize_model_grads": parameters(finalize_model_grads),
            "forward_step_calc_loss": source(schedules.forward_step_calc_loss),
            "packed": parameters(PackedSeqParams),
            "ddp": source(DistributedDataParallel.__init__),
            "tracker": sorted(vars(tracker)),
            "filesystem_async": source(filesystem_async),
            "router": source(router.TopKRouter),
            "topk": source(moe_utils.topk_routing_with_score_function),
            "positions": [
                _get_thd_freqs_on_this_cp_rank(rank, 2, torch.empty(8), torch.arange(16)).tolist() for rank in (0, 1)
            ],
        }
        """
    )
    return result


@pytest.fixture
def core() -> Version:
    return Version(Version(upstream()["megatron.core"]).public)


def test_the_imported_megatron_is_installed_and_in_the_supported_range(core: Version) -> None:
    assert core == Version(upstream()["distribution"])
    assert Version("0.16.1") <= core < Version("0.20")


def test_groups_are_private_variables_in_capitals(core: Version) -> None:
    """training/reference.py exchanges them, but for those that belong to no layout."""
    names = upstream()["parallel_state"]
    assert {"_GLOBAL_MEMORY_BUFFER", "_global_process_group_list"} <= set(names)
    assert ("_GLOBAL_SYMMETRIC_MEMORY_BUFFER" in names) is (core < Version("0.17"))
    groups = [line.split()[1] for line in upstream()["destroy"].splitlines() if line.strip().startswith("global _")]
    assert len(groups) > 30
    odd = [name for name in groups if not (name.startswith("_") and name.isupper()) and name in names]
    assert set(odd) <= {"_global_process_group_list"}


def test_clipping_loops_from_0_17_on_without_multi_tensor_scale_tensor(core: Version) -> None:
    """training/upstream_fixes/multi_tensor_kernels.py; the stand-in lacks the function, as version 2.11 does."""
    names = {"multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl"}
    assert names <= set(upstream()["clip_grads"])
    assert ("multi_tensor_scale_tensor_impl" in upstream()["clip_grads"]) is (core >= Version("0.17"))
    assert upstream()["loops_used"] is (core >= Version("0.17"))


def test_an_optimizer_step_reads_all_state_from_the_inner_optimizer(core: Version) -> None:
    """A step reads parameters and states from the inner optimizer."""
    norm = "get_main_grads_for_grad_norm" if core < Version("0.19") else "get_grads_for_grad_norm"
    source = upstream()["optimizer"]
    assert f"def {norm}(self" in source
    assert "for param_group in self.optimizer.param_groups:" in source  # get_parameters, for norm and clipping
    assert "self.optimizer.step()" in source
    for name in ("_copy_model_grads_to_main_grads", "_copy_main_params_to_model_params"):
        assert f"self.{name}()" in source
    # Adam's states are read from the same place, as tensors of each shard, which are written in place.
    assert "self.optimizer.state[main_param]" in upstream()["distributed_optimizer"]
    assert "dst_tensors[key].copy_(tensors[key])" in upstream()["distributed_optimizer"]
    assert upstream()["adam_of_optimizer"] == "FusedAdam"


def test_sgd_is_built_without_the_function_that_makes_its_state() -> None:
    """training/upstream_fixes/sgd.py; loading a checkpoint calls it."""
    of_sgd = upstream()["optimizers"].split("optimizer == 'sgd'")[1].split("else:")[0]
    assert "optimizer = SGD(" in of_sgd and "init_state_fn = None" in of_sgd
    assert "self.init_state_fn(self.optimizer, self.config)" in upstream()["optimizer"]


def test_losses_of_moe_layers_are_reported_with_these_settings() -> None:
    """training/upstream_fixes/routers.py calls the tracker if there is one, else track_moe_metrics."""
    used = {"loss_scale", "iteration", "total_loss_dict", "force_initialize", "track_names", "num_layers",
            "moe_layer_freq"}  # fmt: skip
    assert used <= set(upstream()["report"])


def test_the_gradient_norm_counts_a_parameter_on_all_ranks_if_it_is_marked(core: Version) -> None:
    """training/upstream_fixes/marks.py sets this mark, and `allreduce`."""
    assert "tensor_model_parallel" in upstream()["duplicate"]
    sets_marks = "_set_expert_parameter_attributes" in upstream()["grouped"]
    assert sets_marks is (core >= Version("0.19"))
    assert sets_marks or '"allreduce", not (is_expert and self.expert_parallel)' in upstream()["grouped"]


def test_experts_are_multiplied_and_stored_as_one_tensor_needs_them() -> None:
    """training/moe/grouped_experts.py: the forward that it replaces, and Megatron's buffers in reverse order."""
    assert "def forward(self, x, m_splits):" in upstream()["grouped_forward"]
    assert "return out, None" in upstream()["grouped_forward"]
    assert "for param in params[::-1]:" in upstream()["buffer"]


def test_functions_that_the_cpu_platform_wraps_have_these_parameters() -> None:
    assert upstream()["move"] == ["tensor", "as_numpy", "record_stream"]
    assert upstream()["disable_jit_fuser"] == []
    assert {"tensor_send_prev", "tensor_send_next"} <= set(upstream()["p2p_ops"])


def test_the_engine_calls_these_names() -> None:
    assert upstream()["swiglu"] == "SwiGLUFunction"
    assert upstream()["finalize_model_grads"][:2] == ["model", "num_tokens"]
    assert "if len(outputs) == 3:" in upstream()["forward_step_calc_loss"]  # two values: the loss and its metrics
    assert {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"} <= set(upstream()["packed"])
    assert "self.buffers" in upstream()["ddp"] and "self.expert_parallel_buffers" in upstream()["ddp"]
    assert {"states_", "seeds_"} <= set(upstream()["tracker"])


def test_the_queue_of_checkpoint_results_is_created_unless_it_exists(core: Version) -> None:
    """training/upstream_fixes/result_queue.py creates it first; the function was renamed in 0.17."""
    name = "get_write_results_queue" if core >= Version("0.17") else "_get_write_results_queue"
    body = upstream()["filesystem_async"].split(f"\ndef {name}(")[1].split("\n\n\n")[0]
    assert "if _results_queue is None:" in body and body.endswith("return _results_queue")
    assert f"self.results_queue = {name}()" in upstream()["filesystem_async"]


def test_a_router_asks_an_object_of_its_own_for_its_experts() -> None:
    """training/moe/router_replay.py puts one there for the time of a pass; layers are numbered from 1."""
    assert "self.router_replay = None" in upstream()["router"]
    assert "router_replay=self.router_replay" in upstream()["router"]
    asked = "router_replay.get_replay_topk( scores, topk, num_groups, group_topk, _compute_topk )"
    assert asked in " ".join(upstream()["topk"].split())


def test_a_dispatcher_of_one_rank_reads_its_expert_count_only_for_sorting() -> None:
    """It reads its number of experts only to decide whether to sort.

    training/moe/row_dispatch.py changes the number.
    """
    body = upstream()["dispatcher"].split("    def preprocess(")[1]
    code = [line.strip() for line in body.splitlines() if "self.num_local_experts" in line and "# [" not in line]
    assert code == [
        "(self.num_local_experts,),",  # with a capacity
        "self.ep_size, self.num_local_experts",  # with several ranks
        "if self.num_local_experts > 1:",
        "-1, self.num_local_experts",
        "if self.num_local_experts > 1:",
        "self.num_local_experts,",  # with a capacity, as the next and the last but one
        "self.num_local_experts,",
        "if self.num_local_experts > 1:",
        "self.num_local_experts,",
        "if self.num_local_experts > 1 and not self.config.moe_permute_fusion:",
    ]
    assert "token_dispatcher.num_local_experts" not in upstream()["moe_layer"]


def test_a_layer_of_experts_calls_six_methods_of_its_dispatcher() -> None:
    """training/moe/row_dispatch.py replaces the dispatcher."""
    called = set(re.findall(r"self\.token_dispatcher\.(\w+)", upstream()["moe_layer"]))
    of_stages = {f"{stage}_{part}" for stage in ("dispatch", "combine") for part in ("preprocess", "postprocess")}
    at_the_start, while_serving = {"set_shared_experts"}, {"routing_map"}
    of_the_base = {"get_expert_zero_copy_buffers"}  # from megatron-core 0.19 on
    assert of_stages | {"token_dispatch", "token_combine"} <= called
    assert called <= of_stages | {"token_dispatch", "token_combine"} | at_the_start | while_serving | of_the_base


def test_swiglu_of_experts_is_a_class_of_its_own() -> None:
    """training/layers/fast_kernels.py replaces the class; training/moe/weighted_swiglu.py has the same arguments."""
    assert upstream()["weighted_swiglu"] == ["ctx", "input", "weights", "fp8_input_store"]
    assert upstream()["weighted_swiglu_gradients"].rstrip().endswith("return tmp, wgrad, None")
    assert "WeightedSwiGLUFunction.apply(input, weights, fp8_input_store)" in upstream()["weighted_swiglu_caller"]
    assert "input.view(-1, ori_shape[-1])" in upstream()["weighted_swiglu_caller"]
    condition = "if self.activation_func == F.silu and self.config.gated_linear_unit:"
    for caller in upstream()["weighted_swiglu_callers"]:
        before, _ = " ".join(caller.split()).split("= weighted_bias_swiglu_impl(")  # the only call
        assert condition in before[-200:] and "elif self.config.bias_activation_fusion" in before


def test_stages_exchange_shapes_before_every_tensor_and_wait_for_the_gpu() -> None:
    """One method exchanges them.

    training/stage_shapes.py replaces the method; training/preparation.py switches off the wait after each tensor.
    """
    exchanged = ["self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"]
    assert upstream()["communicate_shapes"] == exchanged
    compact = "".join(upstream()["communicate"].split())
    assert "self._communicate_shapes(tensor_send_next,tensor_send_prev,recv_prev,recv_next)" in compact
    assert "ifconfig.batch_p2p_commandconfig.batch_p2p_sync:" in compact
    table = ["num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"]
    assert upstream()["schedule_table"] == table
    assert "schedule_table = get_schedule_table(" in upstream()["schedules"]


def test_the_interleaved_schedule_frees_tensors_in_flight_below_0_18(core: Version) -> None:
    """It frees what it sends before the send has ended.

    Once no supported version does, delete SENDS_END_BEFORE_MEMORY_IS_FREED.
    """
    wait = "if send_next_wait_handle is not None and config.deallocate_pipeline_outputs:"
    assert (wait in upstream()["schedules"]) is (core >= Version("0.18")) is SENDS_END_BEFORE_MEMORY_IS_FREED


def test_context_parallel_ranks_rotate_by_positions_of_zigzag_slices() -> None:
    """Whatever slices they hold; so --cp_partition_mode contiguous is refused."""
    assert upstream()["positions"] == [zigzag_positions([16], rank, 2) for rank in (0, 1)]

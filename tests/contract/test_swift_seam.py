"""Names and behaviour of ms-swift, mcore-bridge, megatron-core, vLLM and torch that this package relies on.

If one of them changes upstream, a test fails here by name, before a run does.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import pytest

from tests.support.interpreter import result_of


@cache
def upstream() -> dict[str, Any]:
    """Collect everything in one interpreter, because importing these packages takes 20 seconds."""
    result: dict[str, Any] = result_of(
        """
        from swift.megatron.arguments import MegatronRLHFArguments
        from swift.megatron.pipelines.train.rlhf import MegatronRLHF
        from swift.megatron.pipelines.train.sft import MegatronSft
        from swift.megatron.trainers.base import BaseMegatronTrainer
        from swift.pipelines.base import SwiftPipeline
        from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
        from swift.megatron.utils.megatron_lm_utils import load_mcore_checkpoint
        from swift.utils import import_external_file, init_process_group
        from swift.cli import main as swift_cli
        from swift.cli._megatron.main import ROUTE_MAPPING
        import swift.megatron.trainers as trainers
        from vllm.device_allocator.cumem import CuMemAllocator
        from vllm import SamplingParams
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from mcore_bridge import GPTBridge
        from mcore_bridge.model.gpt_model import GPTModel

        methods = ("train", "run_train_step", "train_step", "setup_training", "finalize_training", "prepare_model",
                   "save_checkpoint", "_load_checkpoint", "_aggregated_metrics", "merge_lora_adapters",
                   "unmerge_lora_adapters", "get_optimizer_and_scheduler", "on_log", "evaluate", "__init__")
        from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
        from swift.megatron.utils.megatron_lm_utils import is_empty_async_queue

        try:  # vLLM below 0.28, which runs on GPUs only here, has no such class
            from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
            pack_experts = source(CPUUnquantizedExperts.process_weights_after_loading)
        except ImportError:
            pack_experts = None

        result = {
            "save_checkpoint": source(BaseMegatronTrainer.save_checkpoint),
            "run_train_step": source(BaseMegatronTrainer.run_train_step),
            "finalize_training": source(BaseMegatronTrainer.finalize_training),
            "is_empty_async_queue": source(is_empty_async_queue),
            "init_process_group": source(init_process_group),
            "load_mcore_checkpoint": source(load_mcore_checkpoint),
            "save_state_dict_async_finalize": source(save_state_dict_async_finalize),
            "trainer": {name: parameters(getattr(BaseMegatronTrainer, name)) for name in methods},
            "prepare_trainer": source(MegatronRLHF.prepare_trainer),
            "prepare_trainer_of": MegatronRLHF.prepare_trainer.__qualname__,
            "args_class": MegatronRLHF.args_class is MegatronRLHFArguments,
            "_parse_args": parameters(MegatronRLHF._parse_args),
            "_parse_args_source": source(SwiftPipeline._parse_args),
            "run": parameters(MegatronRLHF.run),
            "run_source": source(MegatronSft.run),
            "main_source": source(SwiftPipeline.main),
            "trainers_type": type(trainers).__name__,
            "trainers_getattr": parameters(type(trainers).__getattr__),
            "trainers_structure": trainers._import_structure,
            "import_external_file": source(import_external_file),
            "swift_main": source(swift_cli),
            "megatron_routes": ROUTE_MAPPING,
            "_forward_output_layer": str(inspect.signature(GPTModel._forward_output_layer)),
            "_postprocess": source(GPTModel._postprocess),
            "load_state_as_saved": source(DistributedOptimizer.load_parameter_state_from_dp_reshardable),
            "load_state_resharded": source(DistributedOptimizer.load_parameter_state_from_fully_reshardable),
            "export_weights": parameters(GPTBridge.export_weights),
            "engine": {name: parameters(getattr(GRPOVllmEngine, name)) for name in
                       ("_add_request", "_batch_encode", "_prepare_generation_config", "_add_stop_words",
                        "_get_stop_token_ids", "set_default_max_tokens", "_get_grpo_lora_request")},
            "get_current_usage": source(CuMemAllocator.get_current_usage),
            "cumem_sleep": source(CuMemAllocator.sleep), "cumem_wake_up": source(CuMemAllocator.wake_up),
            "add_request": parameters(LLMEngine.add_request),
            "prompt_logprobs": "prompt_logprobs" in parameters(SamplingParams),
            "_get_prompt_logprobs_dict": source(GPUModelRunner._get_prompt_logprobs_dict),
            "_setup_kernel": source(inspect.unwrap(UnquantizedFusedMoEMethod._setup_kernel)),
            "pack_experts": pack_experts,
        }
        """
    )
    return result


# ---- registration


def test_prepare_trainer_finds_its_class_by_name_in_swift_megatron() -> None:
    source = upstream()["prepare_trainer"]
    assert upstream()["prepare_trainer_of"] == "MegatronRLHF.prepare_trainer"
    assert "'grpo': 'MegatronGRPOTrainer'" in source
    assert "importlib.import_module('swift.megatron.trainers')" in source
    assert "getattr(module, trainer_cls_name)" in source
    assert "trainer_cls(args, self.template, **kwargs)" in source


def test_swift_megatron_trainers_resolves_names_lazily() -> None:
    assert upstream()["trainers_type"] == "_LazyModule"
    assert upstream()["trainers_getattr"] == ["self", "name"]
    assert "MegatronGRPOTrainer" in upstream()["trainers_structure"]["grpo_trainer"]


def test_the_pipeline_parses_arguments_with_its_args_class() -> None:
    assert upstream()["args_class"]
    assert upstream()["_parse_args"] == ["self", "args"]
    assert "parse_args(self.args_class, args)" in upstream()["_parse_args_source"]
    assert "isinstance(args, self.args_class)" in upstream()["_parse_args_source"]


def test_run_loads_the_dataset_before_it_builds_the_trainer() -> None:
    source = upstream()["run_source"]
    assert upstream()["run"] == ["self"]
    assert "self.run()" in upstream()["main_source"]
    assert source.index("self._prepare_dataset()") < source.index("self.prepare_trainer()")


def test_plugins_are_imported_by_path_with_their_folder_first_on_sys_path() -> None:
    source = upstream()["import_external_file"]
    assert "sys.path.insert(0, py_dir)" in source
    assert "spec_from_file_location(module_name, file_path)" in source


def test_the_parent_process_expands_a_config_file_before_ranks_start() -> None:
    source = upstream()["swift_main"]
    assert source.index("parse_yaml_args(argv)") < source.index("subprocess.run(args)")
    assert upstream()["megatron_routes"]["rlhf"] == "swift.cli._megatron.rlhf"


def test_torch_calls_the_entry_points_of_torch_backends() -> None:
    import torch

    assert torch._is_device_backend_autoload_enabled()
    names = {entry.name: entry.value for entry in entry_points(group="torch.backends")}
    assert names["swift_megatron_grpo"] == "swift_megatron_grpo.plugin.autoload:arm"
    assert callable(torch.accelerator.current_accelerator)


# ---- the base class of the trainer


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", ["self", "args", "template"]),
        ("prepare_model", ["self"]),
        ("get_optimizer_and_scheduler", ["self"]),
        ("train", ["self", "train_dataset", "val_dataset"]),
        ("setup_training", ["self", "train_dataset", "val_dataset"]),
        ("run_train_step", ["self", "train_data_iterator", "val_data_iterator"]),
        ("train_step", ["self", "train_data_iterator"]),
        ("_aggregated_metrics", ["self", "metrics", "total_metrics"]),
        ("on_log", ["self", "logs", "prefix"]),
        ("evaluate", ["self", "val_data_iterator"]),
        ("finalize_training", ["self"]),
        ("save_checkpoint", ["self"]),
        ("_load_checkpoint", ["self"]),
        ("merge_lora_adapters", ["self", "adapter_name"]),
        ("unmerge_lora_adapters", ["self"]),
    ],
)
def test_methods_of_the_base_trainer_have_these_parameters(method: str, parameters: list[str]) -> None:
    assert upstream()["trainer"][method] == parameters


def test_old_checkpoints_are_removed_by_one_method_at_the_end_of_a_save() -> None:
    """The trainer overrides it, to write the manifest first."""
    save = upstream()["save_checkpoint"]
    assert save.count("_rotate_checkpoints") == 1
    assert save.strip().endswith("self._rotate_checkpoints(args.output_dir)")


def test_asynchronous_saves_end_before_a_step_and_at_the_end_of_training() -> None:
    step = upstream()["run_train_step"]
    assert step.index("maybe_finalize_async_save(args, blocking=False)") < step.index("self.train_step(")
    assert "maybe_finalize_async_save(self.args, blocking=True" in upstream()["finalize_training"]
    assert "get_num_unfinalized_calls() == 0" in upstream()["is_empty_async_queue"]


def test_resume_may_create_the_process_group_and_reads_a_checkpoints_step() -> None:
    created = upstream()["init_process_group"]
    assert created.startswith("def init_process_group(backend: Optional[str] = None, timeout: int")
    assert created.index("if dist.is_initialized():\n        return") < created.index("dist.init_process_group(")
    assert "'latest_checkpointed_iteration.txt'" in upstream()["load_mcore_checkpoint"]  # has the step


def test_every_rank_raises_if_one_cannot_write_its_part_of_a_checkpoint() -> None:
    """The ranks then exchange the cause, which only the coordinator's error has."""
    finalize = upstream()["save_state_dict_async_finalize"]
    assert "torch.distributed.broadcast(\n        failures_occurred" in finalize
    assert 'raise CheckpointException("write", node_failures)' in finalize


def test_megatron_still_loads_one_optimizer_format_with_gradients_enabled() -> None:
    """grpo_trainer.py works around this. If the test fails, the workaround can be removed."""
    assert "@torch.no_grad()" in upstream()["load_state_resharded"]
    assert "@torch.no_grad()" not in upstream()["load_state_as_saved"]


# ---- output layer, weight export, generation engine


def test_postprocess_calls_the_output_layer_by_one_method_with_its_weight() -> None:
    assert upstream()["_forward_output_layer"] == "(self, hidden_states, *args, **kwargs)"
    calls = upstream()["_postprocess"].split("self._forward_output_layer(")[1:]
    assert calls
    for call in calls:
        assert "weight=output_weight" in call.split(")")[0]
        assert "runtime_gather_output=runtime_gather_output" in call.split(")")[0]


def test_the_bridge_exports_weights_under_hugging_face_names() -> None:
    parameters = upstream()["export_weights"]
    assert parameters[:4] == ["self", "mg_models", "target_device", "only_master_rank"]
    assert {"peft_format", "adapter_name", "converter"} <= set(parameters)


def test_the_engine_encodes_prompts_and_makes_sampling_parameters() -> None:
    """local/ and vllm/sampling.py use these; tests/e2e/test_generation.py compares the results."""
    assert upstream()["engine"] == {
        "_add_request": ["self", "inputs", "generation_config", "request_id", "adapter_request"],
        "_batch_encode": ["self", "infer_requests", "strict"],
        "_prepare_generation_config": ["self", "request_config"],
        "_add_stop_words": ["self", "generation_config", "request_config"],
        "_get_stop_token_ids": ["self", "stop_words"],
        "set_default_max_tokens": ["self", "request_config", "inputs"],
        "_get_grpo_lora_request": ["self", "adapter_request"],
    }


def test_vllms_allocator_counts_memory_asleep_and_empties_torchs_cache() -> None:
    """generation/local/engine.py reads tags and sizes of what a sleeping engine will allocate when it wakes up."""
    usage = upstream()["get_current_usage"]
    assert "for ptr, data in self.pointer_to_data.items()" in usage and "sum_bytes += handle[1]" in usage
    assert ".pop(" not in upstream()["cumem_sleep"] and "data.tag in tags" in upstream()["cumem_wake_up"]
    # torch.cuda below vLLM 0.33, torch.accelerator from there on; engine.py replaces both while it switches
    assert re.search(r"torch\.(cuda|accelerator)\.empty_cache\(\)", upstream()["cumem_sleep"])


# ---- effect of register()


@cache
def registered() -> dict[str, Any]:
    """Call register() before ms-swift is imported, as in a rank, and record which classes ms-swift then chooses."""
    result: dict[str, Any] = result_of(
        """
        from swift_megatron_grpo.plugin.register import register
        register(); register()

        import types
        import swift.megatron.trainers as trainers
        import swift.pipelines.base as base
        from swift.megatron.pipelines.train.rlhf import MegatronRLHF

        sys.modules["swift_megatron_grpo.trainer.grpo_trainer"] = types.ModuleType("without the class")
        try:
            broken = trainers.MegatronGRPOTrainer.__module__
        except ImportError:
            broken = "ImportError"
        del sys.modules["swift_megatron_grpo.trainer.grpo_trainer"]

        class Parsed(Exception):
            pass

        def parse_args(args_class, args):
            raise Parsed(args_class.__module__)  # the class is chosen before anything is parsed

        base.parse_args = parse_args

        def args_class(args, argv=()):
            sys.argv = ["rlhf.py", *argv]
            try:
                MegatronRLHF(args)
            except Parsed as parsed:
                return str(parsed)

        grpo, dpo = ["--rlhf_type", "grpo"], ["--rlhf_type", "dpo"]
        from swift.megatron.trainers import MegatronGRPOTrainer
        names = ["GRPO", "DPO", "KTO", "GKD", "Reward"]
        result = {
            "trainers": {name: getattr(trainers, f"Megatron{name}Trainer").__module__ for name in names},
            "from import": MegatronGRPOTrainer.__module__,
            "broken": broken,
            "parsed with": {
                "command line: grpo": args_class(None, grpo),
                "command line: dpo": args_class(None, dpo),
                "command line: nothing": args_class(None),
                "list: grpo": args_class(grpo),
                "list: dpo": args_class(dpo),
                "list: dpo, command line: grpo": args_class(dpo, grpo),
                "list: grpo, after the others": args_class(grpo),
            },
        }
        """
    )
    return result


def test_register_replaces_only_the_grpo_trainer() -> None:
    assert registered()["trainers"] == {
        "GRPO": "swift_megatron_grpo.trainer.grpo_trainer",
        "DPO": "swift.megatron.trainers.dpo_trainer",
        "KTO": "swift.megatron.trainers.kto_trainer",
        "GKD": "swift.megatron.trainers.gkd_trainer",
        "Reward": "swift.megatron.trainers.reward_trainer",
    }
    assert registered()["from import"] == "swift_megatron_grpo.trainer.grpo_trainer"


def test_a_trainer_that_cannot_be_imported_raises() -> None:
    """It does not fall back to ms-swift's own trainer."""
    assert registered()["broken"] == "ImportError"


def test_register_replaces_only_the_flags_of_grpo() -> None:
    ours, stock = "swift_megatron_grpo.arguments.grpo_arguments", "swift.megatron.arguments.rlhf_args"
    assert registered()["parsed with"] == {
        "command line: grpo": ours,
        "command line: dpo": stock,
        "command line: nothing": stock,
        "list: grpo": ours,
        "list: dpo": stock,
        "list: dpo, command line: grpo": stock,
        "list: grpo, after the others": ours,
    }


# ---- checks of vLLM's weights and log-probs


def test_vllm_scores_a_prompt_by_its_tokens() -> None:
    """LocalVllm.start_scoring relies on it: log-probs of a prompt's tokens are those of the unmodified logits."""
    assert upstream()["add_request"][1:4] == ["request_id", "prompt", "params"]
    assert upstream()["prompt_logprobs"]
    assert "self.sampler.compute_logprobs(logits)" in upstream()["_get_prompt_logprobs_dict"]


def test_vllm_packs_experts_on_the_cpu_only_at_the_first_load() -> None:
    """platforms/cpu/fixes.py packs them after later loads; if vLLM did so itself, they would be packed twice."""
    if upstream()["pack_experts"] is None:
        pytest.skip("this vLLM is not one that the CPU platform runs")
    source = upstream()["_setup_kernel"]
    assert "is_weight_update = self.moe_kernel is not None" in source
    assert "process_weights_after_loading" in source.split("if not is_weight_update:")[1]
    assert "cpu_prepack_moe_weight(layer.w13_weight, self.isa)" in upstream()["pack_experts"]

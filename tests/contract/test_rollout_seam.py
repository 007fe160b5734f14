"""Names and behaviour of ms-swift's `swift rollout` and vLLM's AsyncLLM that the rollout server relies on."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.interpreter import result_of


@cache
def upstream() -> dict[str, Any]:
    result: dict[str, Any] = result_of(
        """
        import swift.cli.main as swift_cli
        from swift.arguments import RolloutArguments
        from swift.infer_engine import GRPOVllmEngine, RequestConfig, VllmEngine
        from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest
        from swift.megatron.pipelines.train.rlhf import MegatronRLHF
        from swift.pipelines.infer import rollout
        from uvicorn.protocols.http.auto import AutoHTTPProtocol
        from vllm.config import ParallelConfig, VllmConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.model_manager import LoRAModelManager
        from vllm.outputs import CompletionOutput
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.worker import gpu_model_runner, worker_base
        from vllm.v1.worker.gpu import model_runner
        import swift.cli.rollout as script

        deploy = rollout.SwiftRolloutDeploy
        aux_check = getattr(VllmConfig, "_verify_aux_output_compatibility", None)
        result = {
            "route": swift_cli.ROUTE_MAPPING["rollout"],
            "script": source(script),
            "set_adapter_mapping": source(LoRAModelManager.set_adapter_mapping),
            "rollout_main": source(rollout.rollout_main),
            "async_llm_worker": source(rollout.async_llm_worker),
            "prepare_engine": source(VllmEngine._prepare_engine),
            "LLMEngine": parameters(LLMEngine.__init__),
            "of_LLMEngine": [*vars(LLMEngine)],
            "step": source(LLMEngine.step),
            "has_work": source(EngineCoreProc.has_work),
            "from_vllm_config": parameters(AsyncLLM.from_vllm_config),
            "get_infer_engine": source(deploy.get_infer_engine),
            "get_rollout_engine_type": source(rollout.get_rollout_engine_type),
            "set_default_max_tokens": parameters(VllmEngine.set_default_max_tokens),
            "__init__": source(deploy.__init__),
            "lifespan": source(deploy.lifespan),
            "routes": source(deploy._register_rl_rollout_app),
            "_require_api_key": parameters(deploy._require_api_key),
            "_start_data_parallel_workers": parameters(deploy._start_data_parallel_workers),
            "run": source(deploy.run),
            "defaults": [RolloutArguments.host, RolloutArguments.port, RolloutArguments.api_key],
            "checks": [source(RolloutArguments._check_device_count), source(RolloutArguments._set_default_engine_type)],
            "_prepare_vllm_client": parameters(MegatronRLHF._prepare_vllm_client),
            "asynchronous": [name for name in ("collective_rpc", "reset_prefix_cache", "reset_encoder_cache", "errored",
                                               "shutdown", "vllm_config") if hasattr(AsyncLLM, name)],
            "AsyncLLM": source(AsyncLLM.__init__),
            "generate": parameters(AsyncLLM.generate),
            "generate_source": source(AsyncLLM.generate),
            "errored": source(AsyncLLM.errored.fget),
            "infer_async": source(GRPOVllmEngine.__mro__[1].infer_async),
            "adapter": parameters(GRPOVllmEngine._get_grpo_lora_request_async),
            "parallel": sorted(ParallelConfig.__dataclass_fields__),
            "output_handler": source(AsyncLLM._run_output_handler),
            "protocol": source(AutoHTTPProtocol),
            "cli_main": source(swift_cli.cli_main),
            "infer": source(deploy.infer),
            "extension": source(worker_base),
            "experts": [
                "routed_experts" in parameters(CompletionOutput),
                "enable_return_routed_experts" in parameters(EngineArgs),
                "routed_experts" in ChatCompletionResponseChoice.__dataclass_fields__,
            ],
            "second_runner": source(model_runner.GPUModelRunner),
            "aux_check": source(aux_check) if aux_check else None,  # older versions, on GPUs, have none
            "bookkeeping": source(gpu_model_runner.GPUModelRunner._bookkeeping_sync),
            "seeded": ["seed" in parameters(RequestConfig), "uuid" in parameters(RolloutInferRequest)],
        }
        """
    )
    return result


def test_swift_rollout_runs_this_script_and_this_class() -> None:
    assert upstream()["route"] == "swift.cli.rollout"  # plugin/command_line.py recognises the process by it
    assert "rollout_main()" in upstream()["script"]
    assert "SwiftRolloutDeploy(args).main()" in upstream()["rollout_main"]


def test_the_worker_builds_its_engine_from_names_in_its_module() -> None:
    """generation/server/engine_process.py replaces the class, in a separate process."""
    source = upstream()["async_llm_worker"]
    assert "SwiftRolloutDeploy.get_infer_engine(args" in source
    assert "connection.send({'status': 'ready'})" in source and "command['type'] == 'shutdown'" in source
    source = upstream()["get_infer_engine"]
    assert "return GRPOVllmEngine(**kwargs)" in source
    assert source.index("'worker_extension_cls'") < source.index("kwargs['engine_kwargs'] = engine_kwargs")
    assert "'logprobs_mode'] = 'processed_logprobs'" in source


def test_the_worker_builds_its_scheduler_from_a_name_in_its_module() -> None:
    """generation/server/engine_process.py runs conversations with the same scheduler."""
    assert "get_rollout_engine_type(args, engine)" in upstream()["async_llm_worker"]
    source = upstream()["get_rollout_engine_type"]
    assert "if args.multi_turn_scheduler:" in source and "scheduler_cls(infer_engine=engine" in source


def test_the_engine_checks_the_length_limit_after_it_has_encoded_a_prompt() -> None:
    """generation/server/engine_process.py rejects prompts at this point, in the task of the conversation."""
    source = upstream()["infer_async"]
    encode, generate = source.index("self.template.encode"), source.index("self._infer_full_async")
    assert encode < source.index("self.set_default_max_tokens(request_config, inputs)") < generate
    assert upstream()["set_default_max_tokens"] == ["self", "request_config", "inputs"]


def test_the_server_starts_workers_in_init_and_awaits_them_in_lifespan() -> None:
    source = upstream()["__init__"]
    assert source.index("_register_rl_rollout_app()") < source.index("self._start_data_parallel_workers()")
    assert "self.connections = []" in source and "self.processes = []" in source
    assert upstream()["_start_data_parallel_workers"] == ["self"]
    assert "msg.get('status') == 'ready'" in upstream()["lifespan"]
    assert "uvicorn.run(self.app, host=args.host, port=args.port" in upstream()["run"]


def test_uvicorn_limits_neither_idle_connections_nor_headers() -> None:
    """generation/server/gate.py does both, with these attributes. If uvicorn does, remove it."""
    source = upstream()["protocol"]
    assert all(f"self.{name} = " in source for name in ("connections", "cycle", "transport", "loop"))
    made = source.split("def connection_made", 1)[1].split("    def ", 1)[0]
    assert "self.connections.add(self)" in made and "call_later" not in made


def test_the_output_handler_looks_its_processor_up_at_every_step() -> None:
    """generation/server/health.py replaces the method, to detect that the engine generates."""
    assert "output_processor.process_outputs(" in upstream()["output_handler"]


def test_the_launcher_prints_the_command_with_all_arguments() -> None:
    """plugin/command_line.py masks the key in this line. The script calls `print` of its module."""
    assert "print(f\"run sh: `{' '.join(args)}`\", flush=True)" in upstream()["cli_main"]


def test_stock_routes_wait_for_the_engine_in_the_event_loop() -> None:
    """generation/server/deploy.py runs them in a thread, one at a time."""
    assert "all_outputs = [connection.recv() for connection in self.connections]" in upstream()["infer"]


def test_every_route_except_health_requires_the_api_key() -> None:
    assert upstream()["_require_api_key"] == ["self"]
    routes = [line for line in upstream()["routes"].splitlines() if "self.app." in line and "/health" not in line]
    assert len(routes) > 10 and all("dependencies=guard" in line for line in routes)


def test_defaults_that_this_package_changes() -> None:
    assert upstream()["defaults"] == ["0.0.0.0", 8000, None]
    assert "get_device_count()" in upstream()["checks"][0]
    assert "self.vllm_use_async_engine = False" in upstream()["checks"][1]


@pytest.mark.parametrize("name", ["collective_rpc", "reset_prefix_cache", "reset_encoder_cache", "errored", "shutdown"])
def test_the_asynchronous_engine_has_attribute(name: str) -> None:
    assert name in upstream()["asynchronous"]


def test_the_engine_of_one_device_can_be_replaced_by_one_in_a_thread() -> None:
    """server/worker.py replaces the name AsyncLLMEngine; server/engine_thread.py runs an LLMEngine."""
    source = upstream()["prepare_engine"]
    assert "AsyncLLMEngine if self.use_async_engine" in source and "from_engine_args(self.engine_args)" in source
    assert {"vllm_config", "executor_class", "log_stats", "usage_context"} <= set(upstream()["LLMEngine"])
    used = {"add_request", "abort_request", "step", "has_unfinished_requests", "collective_rpc", "list_loras",
            "reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache"}  # fmt: skip
    assert used <= set(upstream()["of_LLMEngine"])
    assert "self.output_processor.process_outputs(" in upstream()["step"]
    assert all(part in upstream()["has_work"] for part in ("self.scheduler.has_requests()", "bool(self.batch_queue)"))
    assert {"vllm_config", "usage_context", "disable_log_stats"} <= set(upstream()["from_vllm_config"])


def test_requests_can_select_a_replica_and_an_adapter() -> None:
    """generation/server/engine_process.py computes the log-probs of a fixed text with every replica."""
    assert {"lora_request", "data_parallel_rank"} <= set(upstream()["generate"])
    assert upstream()["adapter"] == ["self", "adapter_request"]


def test_vllm_aborts_a_request_when_its_task_is_cancelled() -> None:
    """generation/server/routes.py relies on it when a client disconnects."""
    source = upstream()["generate_source"]
    assert "except (asyncio.CancelledError, GeneratorExit):" in source and "await self.abort(" in source


def test_an_engine_whose_core_was_killed_reports_an_error() -> None:
    """generation/server/engine_process.py watches this property and exits when it is set."""
    assert "self.engine_core.resources.engine_dead" in upstream()["errored"]


def test_the_template_encodes_prompts_in_another_thread() -> None:
    """generation/server/engine_process.py encodes prompts as infer_async does."""
    source = upstream()["infer_async"]
    assert "self.template.set_mode('vllm')" in source
    assert "run_in_executor(None, self.template.encode, infer_request, True)" in source


def test_vllm_mixes_the_extension_class_into_its_worker() -> None:
    assert "worker_extension_cls" in upstream()["extension"]
    assert {"data_parallel_index", "tensor_parallel_size"} <= set(upstream()["parallel"])
    assert "self.vllm_config = vllm_config" in upstream()["AsyncLLM"]


def test_the_code_that_the_cpu_platform_fixes_still_exists() -> None:
    """platforms/cpu/fixes.py: reset_generators_of_partial_prefills."""
    assert "gen.set_offset(gen.get_offset() - 4)" in upstream()["bookkeeping"]
    assert "self.discard_request_mask.np[:num_reqs]" in upstream()["bookkeeping"]


def test_requests_have_seeds_and_one_method_creates_the_trainers_client() -> None:
    assert upstream()["seeded"] == [True, True]
    assert upstream()["_prepare_vllm_client"] == ["self"]


def test_vllm_reports_the_experts_that_its_routers_choose() -> None:
    assert upstream()["experts"] == [True, True, True]


def test_the_second_runner_calls_the_connector_as_the_cpu_platform_does() -> None:
    """platforms/cpu/routed_experts.py calls it from the first runner."""
    if upstream()["aux_check"] is None:
        pytest.skip("this vLLM is not that of the CPU platform")
    runner = " ".join(upstream()["second_runner"].split())
    assert "begin_step( scheduler_output.aux_output_connector_metadata )" in runner
    assert "self.aux_output_connector.prepare_output(input_batch)" in runner
    assert "if not self.use_v2_model_runner and not" in upstream()["aux_check"]


def test_vllm_writes_the_tables_of_an_adapter_if_its_mapping_changes() -> None:
    assert "if self._last_mapping != mapping" in upstream()["set_adapter_mapping"]

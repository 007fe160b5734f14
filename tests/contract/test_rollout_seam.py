"""The seams of the rollout server with ms-swift's `swift rollout` and vLLM's asynchronous engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.contract.test_swift_seam import look


@cache
def upstream() -> dict[str, Any]:
    seen: dict[str, Any] = look(
        """
        import swift.cli.main as swift_cli
        from swift.arguments import RolloutArguments
        from swift.infer_engine import GRPOVllmEngine, RequestConfig, VllmEngine
        from swift.infer_engine.protocol import RolloutInferRequest
        from swift.megatron.pipelines.train.rlhf import MegatronRLHF
        from swift.pipelines.infer import rollout
        from vllm.config import ParallelConfig
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.worker import gpu_model_runner, worker_base
        import swift.cli.rollout as script

        deploy = rollout.SwiftRolloutDeploy
        seen = {
            "route": swift_cli.ROUTE_MAPPING["rollout"],
            "script": source(script),
            "rollout_main": source(rollout.rollout_main),
            "async_llm_worker": source(rollout.async_llm_worker),
            "get_infer_engine": source(deploy.get_infer_engine),
            "get_rollout_engine_type": source(rollout.get_rollout_engine_type),
            "infer_async": source(VllmEngine.infer_async),
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
            "given_up": source(AsyncLLM.generate),
            "errored": source(AsyncLLM.errored.fget),
            "infer_async": source(GRPOVllmEngine.__mro__[1].infer_async),
            "adapter": parameters(GRPOVllmEngine._get_grpo_lora_request_async),
            "parallel": sorted(ParallelConfig.__dataclass_fields__),
            "extension": source(worker_base),
            "bookkeeping": source(gpu_model_runner.GPUModelRunner._bookkeeping_sync),
            "seeded": ["seed" in parameters(RequestConfig), "uuid" in parameters(RolloutInferRequest)],
        }
        """
    )
    return seen


def test_swift_rollout_is_this_script_and_runs_this_class() -> None:
    assert upstream()["route"] == "swift.cli.rollout"  # autoload.py knows the process by it
    assert "rollout_main()" in upstream()["script"]
    assert "SwiftRolloutDeploy(args).main()" in upstream()["rollout_main"]


def test_the_worker_builds_its_engine_from_names_in_its_module() -> None:
    """server/worker.py puts another class in their place, in a process of its own."""
    source = upstream()["async_llm_worker"]
    assert "SwiftRolloutDeploy.get_infer_engine(args" in source
    assert "connection.send({'status': 'ready'})" in source and "command['type'] == 'shutdown'" in source
    source = upstream()["get_infer_engine"]
    assert "return GRPOVllmEngine(**kwargs)" in source
    assert source.index("'worker_extension_cls'") < source.index("kwargs['engine_kwargs'] = engine_kwargs")
    assert "'logprobs_mode'] = 'processed_logprobs'" in source


def test_the_worker_builds_its_scheduler_from_a_name_in_its_module_as_well() -> None:
    """server/worker.py leads with that very one."""
    assert "get_rollout_engine_type(args, engine)" in upstream()["async_llm_worker"]
    source = upstream()["get_rollout_engine_type"]
    assert "if args.multi_turn_scheduler:" in source and "scheduler_cls(infer_engine=engine" in source


def test_the_engine_looks_for_room_when_it_has_encoded_a_prompt() -> None:
    """server/conversations.py refuses there, in the task of the conversation."""
    source = upstream()["infer_async"]
    encoded, asked = source.index("self.template.encode"), source.index("self._infer_full_async")
    assert encoded < source.index("self.set_default_max_tokens(request_config, inputs)") < asked
    assert upstream()["set_default_max_tokens"] == ["self", "request_config", "inputs"]


def test_the_server_starts_its_workers_when_it_is_built_and_waits_for_them_in_its_lifespan() -> None:
    source = upstream()["__init__"]
    assert source.index("_register_rl_rollout_app()") < source.index("self._start_data_parallel_workers()")
    assert "self.connections = []" in source and "self.processes = []" in source
    assert upstream()["_start_data_parallel_workers"] == ["self"]
    assert "msg.get('status') == 'ready'" in upstream()["lifespan"]
    assert "uvicorn.run(self.app, host=args.host, port=args.port" in upstream()["run"]


def test_every_route_but_health_is_guarded() -> None:
    assert upstream()["_require_api_key"] == ["self"]
    routes = [line for line in upstream()["routes"].splitlines() if "self.app." in line and "/health" not in line]
    assert len(routes) > 10 and all("dependencies=guard" in line for line in routes)


def test_defaults_that_we_change() -> None:
    assert upstream()["defaults"] == ["0.0.0.0", 8000, None]
    assert "get_device_count()" in upstream()["checks"][0]
    assert "self.vllm_use_async_engine = False" in upstream()["checks"][1]


@pytest.mark.parametrize("name", ["collective_rpc", "reset_prefix_cache", "reset_encoder_cache", "errored", "shutdown"])
def test_the_asynchronous_engine_has(name: str) -> None:
    assert name in upstream()["asynchronous"]


def test_each_replica_can_be_asked_for_itself_and_with_the_adapter() -> None:
    """server/worker.py: the log-probs of the fixed text."""
    assert {"lora_request", "data_parallel_rank"} <= set(upstream()["generate"])
    assert upstream()["adapter"] == ["self", "adapter_request"]


def test_a_request_is_given_up_when_its_task_is_cancelled() -> None:
    """server/disconnect.py: a client that has gone."""
    source = upstream()["given_up"]
    assert "except (asyncio.CancelledError, GeneratorExit):" in source and "await self.abort(" in source


def test_an_engine_whose_core_was_killed_says_so() -> None:
    """server/worker.py: failure()."""
    assert "self.engine_core.resources.engine_dead" in upstream()["errored"]


def test_a_prompt_is_encoded_by_the_template_in_another_thread() -> None:
    """server/completions.py encodes prompts as infer_async does."""
    source = upstream()["infer_async"]
    assert "self.template.set_mode('vllm')" in source
    assert "run_in_executor(None, self.template.encode, infer_request, True)" in source


def test_vllm_mixes_our_class_into_its_worker() -> None:
    assert "worker_extension_cls" in upstream()["extension"]
    assert {"data_parallel_index", "tensor_parallel_size"} <= set(upstream()["parallel"])
    assert "self.vllm_config = vllm_config" in upstream()["AsyncLLM"]


def test_what_the_cpu_platform_mends_is_still_there() -> None:
    """platforms/cpu/fixes.py: reset_generators_of_partial_prefills."""
    assert "gen.set_offset(gen.get_offset() - 4)" in upstream()["bookkeeping"]
    assert "self.discard_request_mask.np[:num_reqs]" in upstream()["bookkeeping"]


def test_requests_have_seeds_and_the_trainer_a_client_that_we_leave_out() -> None:
    assert upstream()["seeded"] == [True, True]
    assert upstream()["_prepare_vllm_client"] == ["self"]

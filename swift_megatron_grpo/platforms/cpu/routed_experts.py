"""vLLM's report of routed experts (`enable_return_routed_experts`) on a CPU.

vLLM 0.32 reports them from its second model runner only, which needs Triton; on a CPU it has the first one. The parts
on both sides of the runner do not depend on it: hooks at the routers capture the experts of a step, a store keeps those
of cached blocks, and the scheduler attaches rows to completions. This module connects them to the first runner.
"""

from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from swift_megatron_grpo.runtime.replaced import replaced, wrap


def allow_first_runner(config: ModuleType) -> None:
    """Make vLLM's check accept the first model runner; everything else that it checks stays checked."""
    owner: Any = vars(config)["VllmConfig"]
    if not hasattr(owner, "_verify_aux_output_compatibility"):  # vLLM 0.25.1 reports experts from the first runner
        return

    @wrap(owner, "_verify_aux_output_compatibility")
    def verify_without_runner(verify: Any, self: Any) -> None:
        with replaced(owner, "use_v2_model_runner", True):
            verify(self)
        if self.aux_output_config.enabled:
            self.scheduler_config.async_scheduling = False  # the copies of a step's rows would need streams


class _Capture:
    """The captured experts of one runner, between the two halves of a step."""

    def __init__(self, runner: Any, kv_cache_config: Any) -> None:
        worker = import_module("vllm.distributed.aux_output_connector.worker")
        # Ranks of a torchrun each have a scheduler, which waits for rows; vLLM assumes one behind the first rank.
        each_schedules = runner.vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
        first_rank = replaced(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
        with first_rank if each_schedules else nullcontext():
            self.connector = worker.get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)
        self.pending: Any = None  # rows of the step whose tokens are sampled next

    def run(self, runner: Any) -> None:
        """Keep the rows of the step that has run."""
        batch = runner.input_batch
        count = batch.num_reqs
        step = SimpleNamespace(  # the part that the connector reads of the second runner's batch
            req_ids=list(batch.req_ids[:count]),
            query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),  # [requests + 1] first row of each
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),  # [requests] before this step
        )
        self.pending = self.connector.prepare_output(step)

    def attach(self, output: Any) -> None:
        """Attach the rows to the output of the step. Parts of a prompt have sampled nothing, and get theirs later."""
        pending, self.pending = self.pending, None
        if pending is None:  # another tensor-parallel rank reports
            return
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids], np.int32)
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = pending.process_output()


def capture_in_first_runner(gpu_model_runner: Any) -> None:
    """Call vLLM's connector from the first model runner, at the places where the second one calls it."""
    if find_spec("vllm.distributed.aux_output_connector") is None:
        return
    runner = gpu_model_runner.GPUModelRunner
    captures: dict[int, _Capture] = {}  # by runner, of which a process has one for its whole life

    @wrap(runner, "initialize_kv_cache")
    def initialize_and_bind(
        initialize: Any, self: Any, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        initialize(self, kv_cache_config, is_profiling, **kwargs)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            captures[id(self)] = _Capture(self, kv_cache_config)

    @wrap(runner, "execute_model")
    def execute_and_capture(execute: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        capture = captures.get(id(self))
        if capture is not None:
            capture.connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute(self, scheduler_output, *args, **kwargs)
        if capture is not None and scheduler_output.total_num_scheduled_tokens:
            capture.run(self)
        return result

    @wrap(runner, "sample_tokens")
    def sample_and_attach(sample: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        capture = captures.get(id(self))
        if capture is not None:
            capture.attach(output)
        return output

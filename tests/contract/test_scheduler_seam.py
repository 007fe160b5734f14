"""The functions of vLLM that vllm/fast_schedule.py and fast_outputs.py stand in for, and those that call them.

If vLLM changes one of them, its own functions run, and generation is slower. Then read the difference, adapt the two,
and enter the new digest in vllm/known_scheduler.py, if test_fast_decoding.py passes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.support.interpreter import result_of


@cache
def upstream() -> dict[str, Any]:
    result: dict[str, Any] = result_of(
        """
        import inspect
        import vllm
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.engine.core_client import InprocClient
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
        from swift_megatron_grpo.generation.vllm.known_scheduler import KNOWN, digest

        result = {
            "version": vllm.__version__,
            "known": {digest: known.version for digest, known in KNOWN.items()},
            "digest": digest(),
            "steps": [inspect.getsource(step) for step in (EngineCore.step, EngineCore.step_with_batch_queue)],
            "get_output": inspect.getsource(InprocClient.get_output),
            "step": inspect.getsource(LLMEngine.step),
            "fields": {
                kind.__name__: list(inspect.signature(kind).parameters)
                for kind in (CachedRequestData, SchedulerOutput, EngineCoreOutput, EngineCoreOutputs, LogprobsLists,
                             ModelRunnerOutput)
            },
        }
        """
    )
    return result


def test_this_version_is_known() -> None:
    assert upstream()["known"].get(upstream()["digest"]) == upstream()["version"]
    assert len(upstream()["known"]) == len(set(upstream()["known"].values()))


def test_the_core_looks_both_functions_up_at_every_step() -> None:
    """They are replaced on the instance."""
    for source in upstream()["steps"]:
        assert "self.scheduler.schedule(" in source and "self.scheduler.update_from_output(" in source


def test_a_step_may_have_no_outputs() -> None:
    assert "return outputs and outputs.get(0) or EngineCoreOutputs()" in upstream()["get_output"]
    assert "outputs.outputs" in upstream()["step"]


def test_the_objects_have_the_fields_that_are_filled() -> None:
    fields = upstream()["fields"]
    assert fields["CachedRequestData"] == [
        "req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids", "num_computed_tokens",
        "num_output_tokens",
    ]  # fmt: skip
    assert {"scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"} <= {
        *fields["SchedulerOutput"]
    }
    assert {"request_id", "new_token_ids", "new_logprobs"} <= {*fields["EngineCoreOutput"]}
    assert "outputs" in fields["EngineCoreOutputs"]
    assert fields["LogprobsLists"] == [
        "logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens",
    ]  # fmt: skip
    expected = {"sampled_token_ids", "logprobs", "prompt_logprobs_dict", "pooler_output", "kv_connector_output"}
    assert expected | {"num_nans_in_logits", "req_id_to_index"} <= {*fields["ModelRunnerOutput"]}

"""The parts of vLLM's two model runners on which position_noise.py, verification.py and drafts.py rely.

If one of these fails, read the difference and adapt generation/vllm/position_noise.py: seeded completions would be
sampled by vLLM's generators again, or with the noise of other positions, or depend on drafts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.support.interpreter import result_of


@cache
def upstream() -> dict[str, Any]:
    result: dict[str, Any] = result_of(
        """
        from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import MambaManager
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
        from vllm.v1.sample.rejection_sampler import RejectionSampler, rejection_sample
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner
        from vllm.v1.worker.gpu.sample import sampler as second_sampler
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
        from vllm.v1.worker.gpu_input_batch import InputBatch
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        forwards = (TopKTopPSampler.forward_native, TopKTopPSampler.forward_cuda, TopKTopPSampler.forward_cpu)
        result = {
            "sample": parameters(GPUModelRunner._sample),
            "cpu_overrides": "_sample" in vars(CPUModelRunner),
            "sample_source": source(GPUModelRunner._sample),
            "sampler_source": source(Sampler.sample),
            "metadata_source": source(InputBatch._make_sampling_metadata),
            "bookkeeping_source": source(GPUModelRunner._bookkeeping_sync),
            "forwards": [parameters(forward) for forward in forwards],
            "chosen": source(TopKTopPSampler.__init__),
            "filters": parameters(apply_top_k_top_p),
            "kernel": parameters(gumbel_sample),
            "second_sampler": source(second_sampler.Sampler),
            "verification": parameters(rejection_sample),
            "verifies": source(RejectionSampler.forward),
            "proposes": source(GPUModelRunner.propose_draft_token_ids),
            "asks": source(GPUModelRunner._input_fits_in_drafter),
            "proposer": source(create_custom_proposer),
            "finishes": parameters(Scheduler.update_from_output),
            "predicts": source(Qwen3_5MTP.load_weights),
            "shares": source(SpecDecodeBaseProposer),
            "rows_without_drafts": source(GPUModelRunner._prepare_inputs),
            "cached_states": source(MambaManager.find_longest_cache_hit),
        }
        """
    )
    return result


def test_a_step_is_sampled_by_one_method_of_the_first_runner() -> None:
    assert upstream()["sample"] == ["self", "logits", "spec_decode_metadata"]
    assert not upstream()["cpu_overrides"]
    assert "return self.sampler(" in upstream()["sample_source"]


def test_the_sampler_calls_the_forward_that_it_holds() -> None:
    assert upstream()["forwards"] == [["self", "logits", "generators", "k", "p"]] * 3
    assert "self.forward = self.forward_native" in upstream()["chosen"]
    assert upstream()["filters"][:3] == ["logits", "k", "p"]
    assert "self.topk_topp_sampler(" in upstream()["sampler_source"]


def test_greedy_rows_and_min_p_are_no_matter_of_that_forward() -> None:
    sampler = upstream()["sampler_source"]
    assert sampler.index("argmax_invariant") < sampler.index("self.topk_topp_sampler(")
    assert "temperature < _SAMPLING_EPS" in sampler[sampler.index("self.topk_topp_sampler(") :]


def test_the_batch_hands_out_the_generators_that_are_cleared() -> None:
    assert "generators=self.generators" in upstream()["metadata_source"]


def test_a_requests_tokens_are_counted_after_each_sample() -> None:
    bookkeeping = upstream()["bookkeeping_source"]
    assert "self.input_batch.num_tokens_no_spec[req_idx] = end_idx" in bookkeeping
    assert "sampled_ids = [-1]" in bookkeeping  # with asynchronous scheduling as well, before the token is known


def test_the_second_runner_counts_noise_by_the_token_before() -> None:
    """Otherwise drafts, which the first runner verifies, would change completions on a GPU."""
    assert "pos = input_batch.positions[input_batch.logits_indices]" in upstream()["second_sampler"]


def test_drafts_are_verified_by_one_function_of_a_module() -> None:
    """Its arguments by place are those of position_noise.verify; what it returns decides about log-probs as well."""
    assert upstream()["verification"][:8] == ["draft_token_ids", "num_draft_tokens", "max_spec_len",
                                              "cu_num_draft_tokens", "draft_probs", "target_logits", "bonus_token_ids",
                                              "sampling_metadata"]  # fmt: skip
    forward = upstream()["verifies"]
    assert "output_token_ids = rejection_sample(" in forward
    assert forward.index("self.sampler(") < forward.index("rejection_sample(") < forward.index("_get_logprobs_tensors(")


def test_a_class_by_its_name_proposes_after_every_step_that_fits() -> None:
    """drafts.py reads the names of requests from the runner, and raises the limit to which a step fits."""
    assert "self.drafter).propose(\n" in upstream()["proposes"] and "custom_class" in upstream()["proposes"]
    assert "<= self.effective_drafter_max_model_len" in upstream()["asks"]
    assert "user_class(vllm_config)" in upstream()["proposer"]


def test_the_second_runners_kernel_takes_seed_and_position() -> None:
    assert upstream()["kernel"][:6] == ["logits", "expanded_idx_mapping", "temperature", "seed", "pos",
                                        "apply_temperature"]  # fmt: skip


def test_layers_that_predict_are_another_model_with_the_same_embedding() -> None:
    """predicted_drafts.py counts by the scheduler; weights/load/prediction_layers.py loads both models."""
    assert upstream()["finishes"] == ["self", "scheduler_output", "model_runner_output"]
    assert 'name.startswith("mtp.")' in upstream()["predicts"]
    assert "self.model.lm_head = target_language_model.lm_head" in upstream()["shares"]
    assert "self.model.model.embed_tokens = target_embed_tokens" in upstream()["shares"]


def test_a_request_without_drafts_keeps_the_state_behind_its_accepted_ones() -> None:
    """vLLM 0.25.1 continues from the state before them, so it is refused on GPUs (generation/local/engine_settings)."""
    assert "use_spec_decode = self.speculative_config is not None" in upstream()["rows_without_drafts"]
    assert "zero_draft_decode_mask" in upstream()["rows_without_drafts"]


def test_the_prefix_cache_still_returns_states_behind_wrong_drafts() -> None:
    """A failure means that vLLM has mended its issue 53912, and settings/speculation.py may allow prefix caching."""
    assert upstream()["cached_states"].count("drop_eagle_block") == 1  # an argument that nothing reads

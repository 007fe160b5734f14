"""The kernel of sampled log-probs on a GPU, and as vLLM calls it."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_it_agrees_with_fp64() -> None:
    from tests.unit.vllm_shared.logprob_kernel_cases import check

    assert check("cuda") == 5


def test_vllm_calls_it_and_gets_what_it_computes_itself() -> None:
    from vllm.v1.worker.gpu.sample import logprob as sampler

    from swift_megatron_grpo.vllm_shared.fast_logprobs import speed_up_logprobs

    torch.manual_seed(0)
    logits = torch.randn(128, 151_936, device="cuda") * 3
    sampled = torch.randint(0, 151_936, (128,), device="cuda")
    expected = sampler.compute_topk_logprobs(logits, 0, sampled)
    top = sampler.compute_topk_logprobs(logits, 2, sampled)
    speed_up_logprobs()
    assert sampler.compute_token_logprobs.__module__ == "swift_megatron_grpo.vllm_shared.fast_logprobs"
    found = sampler.compute_topk_logprobs(logits, 0, sampled)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=2e-6)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    assert torch.equal(sampler.compute_topk_logprobs(logits, 2, sampled).logprobs, top.logprobs)

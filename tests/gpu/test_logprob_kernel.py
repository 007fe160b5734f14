"""The kernel of sampled log-probs on a GPU, and as vLLM calls it."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_it_agrees_with_fp64() -> None:
    from tests.unit.generation.vllm.logprob_kernel_cases import check

    assert check("cuda") == 5


def test_vllm_calls_it_and_gets_what_it_computes_itself() -> None:
    from vllm.v1.worker.gpu.sample import logprob, sampler

    from swift_megatron_grpo.generation.vllm import fast_logprobs

    torch.manual_seed(0)
    logits = torch.randn(128, 151_936, device="cuda") * 3
    sampled = torch.randint(0, 151_936, (128,), device="cuda")
    [name] = [name for name in fast_logprobs._NAMES if name in vars(sampler)]
    stock = vars(logprob)[name]  # where nothing replaces it
    fast_logprobs.speed_up_logprobs()
    installed = vars(sampler)[name]
    assert installed.__module__ == fast_logprobs.__name__
    expected, found = stock(logits, 0, sampled), installed(logits, 0, sampled)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=2e-6)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    assert torch.equal(installed(logits, 2, sampled).logprobs, stock(logits, 2, sampled).logprobs)

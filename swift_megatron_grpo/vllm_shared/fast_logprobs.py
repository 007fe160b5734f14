"""Log-probs of sampled tokens with less work on the GPU and on the host.

They cost up to 17 % of generation on an H200. A kernel of vLLM's second model runner walks through the logits in 300
dependent steps, and Python makes several lists to append one number to the log-probs of each request. Requests for more
than the sampled token, or for text, take vLLM's own way.

Tests: tests/unit/vllm_shared/test_fast_logprobs.py, on a GPU tests/gpu/test_logprob_kernel.py.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.v1.engine.logprobs import LogprobsProcessor

_append_any = LogprobsProcessor._update_sample_logprobs


def speed_up_logprobs() -> None:
    """Install both in this process; once is enough."""
    LogprobsProcessor._update_sample_logprobs = _append
    if current_platform.is_cuda():
        _install_kernel()


def _append(self: LogprobsProcessor, logprobs_lists: Any) -> None:
    """Append the new tokens' log-probs to those of a request."""
    kept = self.logprobs
    if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(kept, FlatLogprobs):
        _append_any(self, logprobs_lists)
        return
    assert self.cumulative_logprob is not None
    token_ids, logprobs, ranks = logprobs_lists[:3]  # [tokens, 1 or more], the same, [tokens]
    values = logprobs[:, 0].tolist()
    begin, end = len(kept.logprobs), len(kept.logprobs) + len(values)
    for value in values:  # one after the other as vLLM does, because the order decides the rounding
        self.cumulative_logprob += value
    kept.start_indices.extend(range(begin, end))
    kept.token_ids.extend(token_ids[:, 0].tolist())
    kept.logprobs.extend(values)
    kept.ranks.extend(ranks.tolist())
    kept.decoded_tokens.extend([None] * len(values))
    kept.end_indices.extend(range(begin + 1, end + 1))


def _install_kernel() -> None:
    try:
        from vllm.v1.worker.gpu.sample import logprob as sampler
    except ModuleNotFoundError:
        return  # a vLLM without the second model runner

    from swift_megatron_grpo.vllm_shared.logprob_kernel import sampled_logprobs

    stock = sampler.compute_token_logprobs
    if stock.__module__ != sampler.__name__:
        return

    def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        compute = sampled_logprobs if token_ids.shape[1] == 1 else stock
        return compute(logits, token_ids)

    sampler.compute_token_logprobs = compute_token_logprobs

"""Log-probs of sampled tokens with less work on the GPU and on the host.

They cost up to 17 % of generation on an H200 without this file. Kernels of vLLM's second model runner walk through the
logits in 300 dependent steps, and once more for ranks, and Python makes several lists to append one number to the
log-probs of each request. Requests for more than the sampled token, or for text, take vLLM's own way.
"""

from types import ModuleType
from typing import Any

import torch
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from swift_megatron_grpo.runtime.import_hooks import after_import

_MODULES = ("vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.sample.prompt_logprob")
_NAMES = ("compute_topk_scores", "compute_topk_logprobs")  # of one function, in vLLM 0.32 and before
_MORE = ("max_per_req_token_ids", "logits_mode")  # options that ask for more than log-probs of sampled tokens
_append_any = LogprobsProcessor._update_sample_logprobs


def speed_up_logprobs() -> None:
    """Install both in this process; once is enough."""
    LogprobsProcessor._update_sample_logprobs = _append
    if current_platform.is_cuda():
        for module in _MODULES:  # of vLLM's second model runner, which not every run imports
            after_import(module, install_in)


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


def install_in(module: ModuleType) -> None:
    """Replace the function by which a module of vLLM computes log-probs and ranks."""
    from swift_megatron_grpo.generation.vllm.logprob_kernel import sampled_logprobs

    name = next((name for name in _NAMES if name in vars(module)), None)
    if name is None or vars(module)[name].__module__ == __name__:
        return  # a vLLM with another name keeps its own
    stock = vars(module)[name]

    def compute(
        logits: torch.Tensor,
        num_logprobs: int,
        sampled: torch.Tensor,
        cu_num_logits: list[int] | None = None,
        **options: Any,
    ) -> LogprobsTensors:
        if num_logprobs or any(options.get(option) for option in _MORE):
            result: LogprobsTensors = stock(logits, num_logprobs, sampled, cu_num_logits, **options)
            return result
        logprobs, ranks = sampled_logprobs(logits, sampled)
        return LogprobsTensors(sampled.unsqueeze(-1), logprobs, ranks, cu_num_logits)

    setattr(module, name, compute)

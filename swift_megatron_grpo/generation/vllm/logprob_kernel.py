"""Log-probs and ranks of sampled tokens as a Triton kernel that reads the logits once. Imported on CUDA only.

vLLM reads them twice for log-probs, and once more for ranks. It reduces each block of 1,024 logits to one number before
it reads the next: 300 blocks, one after the other, for a vocabulary of 152,000. Here every lane of a block has a
maximum, a sum and a count of its own, and lanes are reduced once at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LANES = 4096


def sampled_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of token_ids [rows] under logits [rows, vocabulary], in fp32 [rows, 1], and their ranks.

    A rank, int64 [rows], is the number of tokens that are at least as probable.
    """
    rows, vocabulary = logits.shape
    logprobs = torch.empty((rows, 1), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _sampled_logprobs[(rows,)](
            logits, logits.stride(0), token_ids.to(torch.int64).contiguous(), logprobs, ranks, vocabulary,
            LANES=_LANES, num_warps=8,
        )  # fmt: skip
    return logprobs, ranks


@triton.jit  # type: ignore[untyped-decorator]
def _sampled_logprobs(logits, stride, token_ids, logprobs, ranks, vocabulary, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    lanes = tl.arange(0, LANES)
    sampled = tl.load(begin + tl.load(token_ids + row)).to(tl.float32)
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)  # of exp(logit - peak)
    rank = tl.zeros((LANES,), tl.int32)
    for start in range(0, vocabulary, LANES):
        places = start + lanes
        values = tl.load(begin + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, values)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a lane may have seen nothing but excluded tokens
        total = total * tl.exp(peak - base) + tl.exp(values - base)
        peak = higher
        rank += (values >= sampled).to(tl.int32)
    top = tl.max(peak)
    normalizer = tl.log(tl.sum(total * tl.exp(peak - top))) + top
    tl.store(logprobs + row, sampled - normalizer)
    tl.store(ranks + row, tl.sum(rank).to(tl.int64))

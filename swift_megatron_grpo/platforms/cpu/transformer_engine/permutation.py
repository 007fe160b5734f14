"""Transformer Engine's permutation of tokens for experts (--moe_permute_fusion), in plain PyTorch.

t: tokens, h: hidden size, e: experts, p: permuted tokens, one for each pair of a token and an expert of its choice.
"""

import torch


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of expert 0, then those of expert 1, ..., [p, h], and for each its (expert, token), [p, 2]."""
    row_id_map = _pairs(routing_map, num_out_tokens)
    return inp.index_select(0, row_id_map[:, 1]), row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what moe_permute returns, with the probability of each pair, [p], in the middle; `probs`: [t, e]."""
    row_id_map = _pairs(routing_map, num_out_tokens)
    expert, token = row_id_map.unbind(1)
    return inp.index_select(0, token), probs[token, expert], row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> torch.Tensor:
    """Return the sum over the experts of every token, [t, h], weighted by `merging_probs` [t, e] and summed in fp32."""
    expert, token = row_id_map.unbind(1)
    values = inp.to(torch.promote_types(inp.dtype, torch.float32))
    if merging_probs is not None:
        values = values * merging_probs[token, expert].unsqueeze(1)
    shape = inp.shape if restore_shape is None else restore_shape
    return values.new_zeros(shape).index_add(0, token, values).to(inp.dtype)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Split the rows into chunks of these sizes and return the chunks in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = moe_sort_chunks_by_index(inp, split_sizes, sorted_index)
    return rows, moe_sort_chunks_by_index(probs, split_sizes, sorted_index)


def _pairs(routing_map: torch.Tensor, num_out_tokens: int) -> torch.Tensor:
    """Return (expert, token) of every choice, sorted by expert, [p, 2]; `routing_map`: [t, e], not 0 for a choice."""
    pairs = routing_map.bool().T.nonzero()
    if 0 <= int(num_out_tokens) != len(pairs):
        raise ValueError(f"{len(pairs)} tokens are routed, and num_out_tokens is {num_out_tokens}: padding is not done")
    return pairs

"""Exact attention of one block of queries over its keys, in fp32, for DotProductAttention.

Shapes: b sequences, h query heads, g key heads (h is a multiple of g), q queries, k keys, d channels of queries and
keys, e channels of values.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one attention call: which keys a query may see, independent of the batch format, and the softmax."""

    causal: bool
    bottom_right: bool  # causal masks align the last query with the last key, not the first with the first
    window: tuple[int, int]  # keys to the left and to the right of the query; -1: all
    scale: float
    softmax_offset: torch.Tensor | None  # [h] logit of a key without a value
    dropout: float


def attend_at(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules, first: int, length: int
) -> torch.Tensor:
    """Attend from queries [b, h, q, d] at positions from `first` on, of sequences with `length` queries, to all keys.

    Keys [b, g, k, d], values [b, g, k, e]; returns [b, h, q, e]. Causal masking reads the visible keys only.
    """
    last, keys = first + query.shape[2], key.shape[2]
    shift = keys - length if rules.bottom_right else 0
    if rules.causal:
        keys = min(max(last + shift, 0), keys)
    if rules.causal and rules.window == (-1, -1) and first == shift == 0 and keys == last:
        allowed, is_causal = None, True  # torch's own causal kernel is the fastest
    else:
        allowed, is_causal = visible(length, key.shape[2], first, last, rules), False
        allowed = None if allowed is None else allowed[:, :keys]
    return attend(query, key[:, :, :keys], value[:, :, :keys], rules, allowed, is_causal)


def visible(queries: int, keys: int, first: int, last: int, rules: Rules) -> torch.Tensor | None:
    """Return the mask [last - first, keys] of keys that these queries see, as Transformer Engine's; None: all."""
    left, right = rules.window
    query_at = torch.arange(first, last)[:, None]  # [q, 1]
    key_at = torch.arange(keys)[None]  # [1, k]
    diagonal = query_at + keys - queries
    conditions = []
    if rules.causal:
        conditions.append(key_at <= (diagonal if rules.bottom_right else query_at))
    if left >= 0:
        conditions.append(key_at >= diagonal - left)
    if right >= 0:
        conditions.append(key_at <= diagonal + right)
    return functools.reduce(torch.logical_and, conditions) if conditions else None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rules: Rules,
    allowed: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Compute attention: [b, h, q, d], [b, g, k, d], [b, g, k, e] -> [b, h, q, e].

    `allowed` is broadcast to [b, h, q, k]. The output of a query that sees no key is zero.
    """
    if key.shape[2] == 0 or query.shape[2] == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    blind = None
    if allowed is not None:
        blind = ~allowed.any(-1, keepdim=True)
        allowed = allowed | blind  # a softmax over no keys is NaN, also in backward
    if rules.softmax_offset is None:
        output = F.scaled_dot_product_attention(
            query, key, value, allowed, rules.dropout, is_causal, scale=rules.scale, enable_gqa=True
        )
    else:
        allowed = visible(query.shape[2], key.shape[2], 0, query.shape[2], rules) if is_causal else allowed
        output = _attend_with_offset(query, key, value, rules, allowed)
    return output if blind is None else output.masked_fill(blind, 0.0)


def _attend_with_offset(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules, allowed: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention with one additional logit per head, which receives weight but has no value."""
    assert rules.softmax_offset is not None
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * rules.scale
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    offset = rules.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, offset], dim=-1).softmax(-1)[..., :-1]
    return F.dropout(weights, rules.dropout) @ value

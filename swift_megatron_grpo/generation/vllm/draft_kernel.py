"""Drafts on the device, as two Triton kernels: where the last tokens of a request came before, and what followed.

vLLM's second model runner never waits for the tokens that it samples, so the host does not have them when drafts are
due. A text is the row of a running request, or one of earlier completions, which lie one after the other. Imported on
CUDA only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from swift_megatron_grpo.generation.vllm.texts import MOST_MATCHED

_PLACES = 256  # of a text, which one program compares
_SCORES = 1024  # that are reduced at a time


@dataclass(frozen=True, slots=True)
class Running:
    """The rows of requests in vLLM's state; a slot is the number of a row."""

    tokens: torch.Tensor  # int32 [slots, longest]
    lengths: torch.Tensor  # int32 [slots]
    prompts: torch.Tensor  # int32 [slots]: the lengths of their prompts


@dataclass(frozen=True, slots=True)
class Kept:
    """Completions that have ended."""

    tokens: torch.Tensor  # int32 [all tokens]
    begins: torch.Tensor  # int64 [texts]: where each begins in `tokens`
    starts: torch.Tensor  # int32 [texts]: its first token behind which a draft may begin
    lengths: torch.Tensor  # int32 [texts]


def propose(
    running: Running,
    kept: Kept,
    sources: torch.Tensor,
    slots: torch.Tensor,
    sampled: torch.Tensor,
    last: torch.Tensor,
    scores: torch.Tensor,
    drafts: torch.Tensor,
) -> None:
    """Write drafts [requests, depth] for the requests of a step, whose rows are `slots` [requests].

    sources: int32 [slots, sources], the texts to look in: a slot, or the number of slots and that of a kept text; -1 is
    none. sampled: [requests], how many tokens the step has sampled of each. last: [slots], the last token, which takes
    the place of a draft where none is found. scores: int64 [requests, sources, blocks of a text], for their own use.
    """
    requests, depth = drafts.shape
    _, count, blocks = scores.shape
    texts = (running.tokens, running.tokens.stride(0), running.lengths, running.prompts,
             kept.tokens, kept.begins, kept.starts, kept.lengths, sources, running.tokens.shape[0])  # fmt: skip
    _match[(requests, count, blocks)](
        *texts, slots, sampled, scores, SOURCES=count, BLOCKS=blocks, PLACES=_PLACES, MOST=MOST_MATCHED, num_warps=4
    )
    _continue[(requests,)](
        *texts, slots, last, scores, drafts, drafts.stride(0), depth, SOURCES=count, BLOCKS=blocks, SCORES=_SCORES,
        WIDTH=triton.next_power_of_2(depth), num_warps=4,
    )  # fmt: skip


def blocks_of(longest: int) -> int:
    """Return how many blocks the scores of a text need."""
    return triton.cdiv(longest, _PLACES)  # type: ignore[no-any-return]


@triton.jit
def _bounds(text, slot, stride, run_lengths, run_prompts, begins, starts, lengths, slots_in_all):  # type: ignore[no-untyped-def]
    """Return where a text begins, the first place behind which a draft may begin, and its length; 0: there is none."""
    runs = (text >= 0) & (text < slots_in_all)
    is_kept = text >= slots_in_all
    number = text - slots_in_all
    begin = tl.where(runs, text * stride, tl.load(begins + number, mask=is_kept, other=0))
    # In the request itself a draft may follow any token; the prompt of another one is the same.
    behind_prompt = tl.load(run_prompts + text, mask=runs & (text != slot), other=1).to(tl.int64) - 1
    start = tl.where(runs, behind_prompt, tl.load(starts + number, mask=is_kept, other=0).to(tl.int64))
    of_running = tl.load(run_lengths + text, mask=runs, other=0)
    length = tl.where(runs, of_running, tl.load(lengths + number, mask=is_kept, other=0)).to(tl.int64)
    return begin, start, length


@triton.jit
def _tokens(run_tokens, tokens, text, begin, places, inside, slots_in_all):  # type: ignore[no-untyped-def]
    """Return the tokens of a text at some places, 0 outside."""
    texts = text + tl.zeros_like(places)
    found = tl.load(run_tokens + begin + places, mask=inside & (texts < slots_in_all), other=0)
    return found + tl.load(tokens + begin + places, mask=inside & (texts >= slots_in_all), other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _match(  # type: ignore[no-untyped-def]
    run_tokens, stride, run_lengths, run_prompts, tokens, begins, starts, lengths, sources, slots_in_all,
    slots, sampled, scores, SOURCES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Score the places of a block: the tokens before them that match, then the order of texts, then the place."""
    row, source, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    text = tl.load(sources + slot * SOURCES + source).to(tl.int64)
    begin, start, length = _bounds(text, slot, stride, run_lengths, run_prompts, begins, starts, lengths, slots_in_all)
    end = tl.where(tl.load(sampled + row) > 0, length - 1, 0)  # a draft has at least one token
    size = tl.load(run_lengths + slot).to(tl.int64)
    places = start + block * PLACES + tl.arange(0, PLACES)  # of the token before a draft
    matches = places < end
    matched = tl.zeros((PLACES,), tl.int64)
    for n in tl.static_range(MOST):
        wanted = tl.load(run_tokens + slot * stride + size - 1 - n, mask=size > n, other=-1)
        inside = matches & (places >= n)
        matches = inside & (_tokens(run_tokens, tokens, text, begin, places - n, inside, slots_in_all) == wanted)
        matched += matches.to(tl.int64)
    score = tl.where(matched > 0, (matched << 48) + ((SOURCES - source) << 32) + places, 0)
    tl.store(scores + (row * SOURCES + source) * BLOCKS + block, tl.max(score, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _continue(  # type: ignore[no-untyped-def]
    run_tokens, stride, run_lengths, run_prompts, tokens, begins, starts, lengths, sources, slots_in_all,
    slots, last, scores, drafts, draft_stride, depth, SOURCES: tl.constexpr, BLOCKS: tl.constexpr,
    SCORES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what follows the best place of a request."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    best = tl.zeros((SCORES,), tl.int64)
    for first in range(0, SOURCES * BLOCKS, SCORES):
        number = first + tl.arange(0, SCORES)
        found = tl.load(scores + row * (SOURCES * BLOCKS) + number, mask=number < SOURCES * BLOCKS, other=0)
        best = tl.maximum(best, found)
    score = tl.max(best, axis=0)
    source = SOURCES - ((score >> 32) & 0xFFFF)
    text = tl.load(sources + slot * SOURCES + source, mask=score > 0, other=-1).to(tl.int64)
    begin, _, length = _bounds(text, slot, stride, run_lengths, run_prompts, begins, starts, lengths, slots_in_all)
    columns = tl.arange(0, WIDTH).to(tl.int64)
    places = (score & 0xFFFFFFFF) + 1 + columns
    inside = (places < length) & (columns < depth)  # without a text its length is 0
    token = _tokens(run_tokens, tokens, text, begin, places, inside, slots_in_all).to(tl.int64)
    token = tl.where(inside, token, tl.load(last + slot).to(tl.int64))
    tl.store(drafts + row * draft_stride + columns, token, mask=columns < depth)

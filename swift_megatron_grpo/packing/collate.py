"""Samples of one micro batch -> the tensors of one packed ("thd") forward pass.

n: packed tokens, padding included; l = n / CP: tokens this context-parallel rank holds; m: completion tokens of the
micro batch; k: those whose log-prob this rank computes; s: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swift_megatron_grpo.packing.plan import Alignment, padded_lengths, zigzag_positions
from swift_megatron_grpo.types import Sample


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Counts over the whole optimizer step: all ranks, all micro batches. Losses and metrics divide by them."""

    sequences: int  # with at least one trained token; metrics divide by these
    tokens: int  # trained tokens
    completions: int  # all samples of the step
    loss_sequences: int  # with those that --overlong_filter leaves out; losses divide by these
    loss_tokens: int
    loss_groups: int  # groups of these sequences


def count(samples: Sequence[Sample]) -> Normalisers:
    trained = [sum(sample.completion_mask) for sample in samples]
    in_loss = [tokens + sample.left_out for tokens, sample in zip(trained, samples, strict=True)]
    return Normalisers(
        sequences=sum(t > 0 for t in trained),
        tokens=sum(trained),
        completions=len(samples),
        loss_sequences=sum(t > 0 for t in in_loss),
        loss_tokens=sum(in_loss),
        loss_groups=len({sample.group for t, sample in zip(in_loss, samples, strict=True) if t > 0}),
    )


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What the model reads."""

    input_ids: torch.Tensor  # [1, l]
    position_ids: torch.Tensor  # [1, l]
    cu_seqlens: torch.Tensor  # [s + 1] int32, of the n packed tokens
    max_seqlen: int
    head_positions: torch.Tensor  # [k] rows of this rank's hidden states that predict a completion token
    head_targets: torch.Tensor  # [k] the tokens they predict
    cp_counts: tuple[int, ...]  # k of every context-parallel rank
    cp_order: torch.Tensor  # [m] where completion token i lies in the concatenation of all ranks' k values


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the loss reads. The same on all ranks of one data-parallel group."""

    indices: tuple[int, ...]  # [s] which samples of the step
    inputs: ModelInputs
    counts: tuple[int, ...]  # [s] trained tokens of each sequence; sums to m
    lengths: torch.Tensor  # [s] the same, on the device
    advantages: torch.Tensor  # [m] fp32
    old_logprobs: torch.Tensor | None  # [m] fp32; None: the policy has not moved since the rollout
    ref_logprobs: torch.Tensor | None  # [m] fp32
    rollout_logprobs: torch.Tensor | None  # [m] fp32, as the engine said
    selected: torch.Tensor | None  # [m] fp32, 0 where the policy loss leaves a token out
    groups: torch.Tensor  # [s] which group a sequence is of, numbered within the micro batch
    num_groups: int
    step: Normalisers


def collate(
    samples: Sequence[Sample],
    indices: Sequence[int],
    step: Normalisers,
    align: Alignment,
    cp_rank: int,
    cp_size: int,
    device: torch.device,
) -> MicroBatch:
    chosen = [samples[i] for i in indices]
    lengths = padded_lengths([len(sample.tokens) for sample in chosen], align)
    tokens, positions, targets = _pack(chosen, lengths)
    held = [zigzag_positions(lengths, rank, cp_size) for rank in range(cp_size)]
    mine = held[cp_rank]

    # The row that predicts token i is row i - 1; rows are numbered in the packed micro batch here.
    rows = [i - 1 for i, _ in targets]
    rows_of_rank = [_rows_held(rows, of_rank) for of_rank in held]
    order = torch.empty(len(rows), dtype=torch.long)
    order[torch.tensor([i for held_rows in rows_of_rank for i, _ in held_rows], dtype=torch.long)] = torch.arange(
        len(rows)
    )

    inputs = ModelInputs(
        input_ids=_long([tokens[i] for i in mine], device)[None],
        position_ids=_long([positions[i] for i in mine], device)[None],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device, non_blocking=True),
        max_seqlen=max(lengths),
        head_positions=_long([local for _, local in rows_of_rank[cp_rank]], device),
        head_targets=_long([targets[i][1] for i, _ in rows_of_rank[cp_rank]], device),
        cp_counts=tuple(len(held_rows) for held_rows in rows_of_rank),
        cp_order=order.to(device, non_blocking=True),
    )
    counts = [sum(sample.completion_mask) for sample in chosen]
    number = {group: place for place, group in enumerate(dict.fromkeys(sample.group for sample in chosen))}
    return MicroBatch(
        indices=tuple(indices),
        inputs=inputs,
        counts=tuple(counts),
        lengths=_long(counts, device),
        advantages=_floats([a for s, c in zip(chosen, counts, strict=True) for a in [s.advantage] * c], device),
        old_logprobs=_per_token([s.old_logprobs for s in chosen], counts, "old", device),
        ref_logprobs=_per_token([s.ref_logprobs for s in chosen], counts, "reference", device),
        rollout_logprobs=_per_token([s.rollout_logprobs for s in chosen], counts, "rollout", device),
        selected=_per_token([s.selected for s in chosen], counts, "selected", device),
        groups=_long([number[sample.group] for sample in chosen], device),
        num_groups=len(number),
        step=step,
    )


def _pack(samples: Sequence[Sample], lengths: Sequence[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Tokens and positions of the packed micro batch, and (packed position, token) of every trained token."""
    tokens: list[int] = []
    positions: list[int] = []
    targets: list[tuple[int, int]] = []
    for sample, length in zip(samples, lengths, strict=True):
        if sample.completion_mask and sample.completion_mask[0]:
            raise ValueError("the first token of a sequence has nothing that predicts it: a prompt needs a token")
        start = len(tokens)
        targets += [(start + i, sample.tokens[i]) for i, trained in enumerate(sample.completion_mask) if trained]
        # Padding follows the sequence it belongs to, so a causal mask hides it; which token it is does not matter.
        tokens += sample.tokens + [0] * (length - len(sample.tokens))
        positions += range(length)
    return tokens, positions, targets


def _rows_held(rows: Sequence[int], held: Sequence[int]) -> list[tuple[int, int]]:
    """(number of the row in `rows`, its place among the positions this rank holds), in the order of `rows`."""
    place = {position: local for local, position in enumerate(held)}
    return [(number, place[row]) for number, row in enumerate(rows) if row in place]


def _per_token(
    values: Sequence[Sequence[float] | None], counts: Sequence[int], name: str, device: torch.device
) -> torch.Tensor | None:
    if all(v is None for v in values):
        return None
    flat: list[float] = []
    for value, length in zip(values, counts, strict=True):
        if value is None or len(value) != length:
            have = "none" if value is None else str(len(value))
            raise ValueError(f"{name} log-probs: {have} for a completion of {length} trained tokens")
        flat += value
    return _floats(flat, device)


def _long(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)


def _floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)

"""Samples of one micro batch -> the tensors of one packed ("thd") forward pass.

n: packed tokens, padding included; l = n / CP: tokens this context-parallel rank holds; m: completion tokens of the
micro batch; k: those whose log-prob this rank computes; s: sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
    old_logprobs: torch.Tensor | None  # [m] fp32; None: the old policy is the one that is trained
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
    held = [torch.tensor(zigzag_positions(lengths, rank, cp_size)) for rank in range(cp_size)]
    mine = held[cp_rank]

    # The row that predicts token i is row i - 1; rows are numbered in the packed micro batch here.
    computed = [_rows_held(targets - 1, of_rank, tokens.shape[0]) for of_rank in held]
    order = torch.empty_like(targets)
    order[torch.cat([numbers for numbers, _ in computed])] = torch.arange(targets.shape[0])
    numbers, places = computed[cp_rank]

    def send(tensor: torch.Tensor) -> torch.Tensor:
        # Only from pinned memory does the host go on while the GPU still works on the micro batch before.
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    counts = tuple(sum(sample.completion_mask) for sample in chosen)
    number = {group: place for place, group in enumerate(dict.fromkeys(sample.group for sample in chosen))}
    per_token = partial(_per_token, counts=counts, send=send)
    return MicroBatch(
        indices=tuple(indices),
        inputs=ModelInputs(
            input_ids=send(tokens[mine][None]),
            position_ids=send(positions[mine][None]),
            cu_seqlens=send(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)),
            max_seqlen=max(lengths),
            head_positions=send(places),
            head_targets=send(tokens[targets[numbers]]),
            cp_counts=tuple(numbers.shape[0] for numbers, _ in computed),
            cp_order=send(order),
        ),
        counts=counts,
        lengths=send(torch.tensor(counts)),
        advantages=send(_floats([s.advantage for s in chosen]).repeat_interleave(torch.tensor(counts))),
        old_logprobs=per_token([s.old_logprobs for s in chosen], name="old"),
        ref_logprobs=per_token([s.ref_logprobs for s in chosen], name="reference"),
        rollout_logprobs=per_token([s.rollout_logprobs for s in chosen], name="rollout"),
        selected=per_token([s.selected for s in chosen], name="selected"),
        groups=send(torch.tensor([number[sample.group] for sample in chosen])),
        num_groups=len(number),
        step=step,
    )


def _pack(samples: Sequence[Sample], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [n] and positions [n] of the packed micro batch, and the packed positions [m] of the trained tokens."""
    # Padding follows the sequence it belongs to, so a causal mask hides it; which token it is does not matter.
    tokens = torch.zeros(sum(lengths), dtype=torch.long)
    trained = torch.zeros(sum(lengths), dtype=torch.bool)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        if sample.completion_mask and sample.completion_mask[0]:
            raise ValueError("the first token of a sequence has nothing that predicts it: a prompt needs a token")
        end = start + len(sample.tokens)
        tokens[start:end] = torch.tensor(sample.tokens)
        trained[start:end] = torch.tensor(sample.completion_mask)
        start += length
    positions = torch.cat([torch.arange(length) for length in lengths])
    return tokens, positions, trained.nonzero()[:, 0]


def _rows_held(rows: torch.Tensor, held: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows [m] those that a rank holds: their numbers in `rows`, and their places on the rank."""
    place = torch.full((total,), -1)
    place[held] = torch.arange(held.shape[0])
    numbers = (place[rows] >= 0).nonzero()[:, 0]
    return numbers, place[rows[numbers]]


def _per_token(
    values: Sequence[Sequence[float] | None],
    counts: Sequence[int],
    send: Callable[[torch.Tensor], torch.Tensor],
    name: str,
) -> torch.Tensor | None:
    if all(v is None for v in values):
        return None
    flat: list[float] = []
    for value, length in zip(values, counts, strict=True):
        if value is None or len(value) != length:
            have = "none" if value is None else str(len(value))
            raise ValueError(f"{name} log-probs: {have} for a completion of {length} trained tokens")
        flat += value
    return send(_floats(flat))


def _floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)

"""Packs the samples of one micro batch into the tensors of one packed ("thd") forward pass.

n: packed tokens, padding included; l = n / CP: tokens of this context-parallel rank; m: completion tokens of the micro
batch; k: completion tokens whose log-prob this rank computes; s: sequences; g: segments, which are sequences, or what
several of them share and what continues it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swift_megatron_grpo.packing.bins import Ints, sums
from swift_megatron_grpo.packing.images import PackedImages, pack_images, positions_of
from swift_megatron_grpo.packing.outlines import Outline
from swift_megatron_grpo.packing.plan import Alignment, zigzag_positions
from swift_megatron_grpo.packing.routing import pack_routing
from swift_megatron_grpo.packing.segments import PackedLayout, lay_out
from swift_megatron_grpo.types import Sample


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Counts over the whole optimizer step: all ranks, all micro batches. Losses and metrics divide by them."""

    sequences: int  # with at least one trained token; divisor of metrics
    tokens: int  # trained tokens; divisor of metrics
    loss_completions: int  # including those that --overlong_filter removes; divisor of losses
    loss_tokens: int  # trained tokens of loss_completions
    loss_groups: int  # groups of loss_completions
    tokens_of: Mapping[int, int]  # trained tokens of each completion of several sequences
    sft_tokens: int  # trained tokens of given answers, which none of the others counts


def count(samples: Sequence[Sample]) -> Normalisers:
    every = Outline.of(samples)
    sampled = every.pick((~every.answers).nonzero()[0]) if every.answers.any() else every
    in_loss = sampled.trained + sampled.left_out
    counted = in_loss > 0
    groups = sampled.groups[counted]
    numbered = sampled.completions >= 0
    completions = sampled.completions[numbered]
    sequences = np.bincount(completions)
    tokens = sums(completions, sampled.trained[numbered], len(sequences)).astype(np.int64)
    [several] = (sequences > 1).nonzero()
    return Normalisers(
        sequences=int(np.count_nonzero(sampled.trained)),
        tokens=int(sampled.trained.sum()),
        loss_completions=_distinct(sampled.completions[counted]),
        loss_tokens=int(in_loss.sum()),
        loss_groups=int(np.count_nonzero(np.bincount(groups - groups.min(initial=0)))),
        tokens_of=dict(zip(several.tolist(), tokens[several].tolist(), strict=True)),
        sft_tokens=int(every.trained[every.answers].sum()),
    )


def num_completions(samples: Sequence[Sample]) -> int:
    """Return the number of completions that these sequences belong to; a given answer belongs to none."""
    outline = Outline.of(samples)
    return _distinct(outline.completions[~outline.answers])


def _distinct(numbers: Ints) -> int:
    """Return the number of completions; below 0, each is another one."""
    return int(np.count_nonzero(numbers < 0) + np.count_nonzero(np.bincount(numbers[numbers >= 0])))


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The tokens that each segment attends to: what it continues, and the segment itself."""

    places: torch.Tensor  # [cu_seqlens[-1]] int64, in the packed micro batch
    cu_seqlens: torch.Tensor  # [g + 1] int32
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class ModelInputs:
    input_ids: torch.Tensor  # [1, l]
    packed_ids: torch.Tensor  # [1, n] of all context-parallel ranks, which a composite model embeds
    position_ids: torch.Tensor  # [1, l]; in a micro batch with images that have axes [3, 1, l]
    cu_seqlens: torch.Tensor  # [g + 1] int32, of the n packed tokens
    max_seqlen: int
    head_positions: torch.Tensor  # [k] rows of this rank's hidden states that predict a completion token
    head_targets: torch.Tensor  # [k] the tokens they predict
    cp_counts: tuple[int, ...]  # k of every context-parallel rank
    cp_order: torch.Tensor  # [m] index of completion token i in the concatenation of all ranks' k values
    images: PackedImages | None  # None: the micro batch is text
    shared: SharedKeys | None = None  # None: every segment is a whole sequence
    routing: torch.Tensor | None = None  # [l, layers, k of experts] int16; -1: the router chooses. None: for all tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of the loss. The same on all model-parallel and context-parallel ranks of a data-parallel rank."""

    indices: tuple[int, ...]  # [s] samples, by index in the step
    inputs: ModelInputs
    counts: tuple[int, ...]  # [s] trained tokens of each sequence; sums to m
    lengths: torch.Tensor  # [s] the same, on the device
    completion_lengths: torch.Tensor  # [s] trained tokens of the completion of a sequence, in all its sequences
    advantages: torch.Tensor  # [m] fp32
    old_logprobs: torch.Tensor | None  # [m] fp32; None: the old policy is the trained one
    ref_logprobs: torch.Tensor | None  # [m] fp32
    teacher_ratios: torch.Tensor | None  # [m] fp32, log(teacher / policy); None: there is no teacher
    teacher_logprobs: torch.Tensor | None  # [m] fp32, with SDAR in place of teacher_ratios
    rollout_logprobs: torch.Tensor | None  # [m] fp32, from the inference engine
    sft_weights: torch.Tensor | None  # [m] fp32, of given answers; None: the policy has sampled the sequences
    selected: torch.Tensor | None  # [m] fp32, 0 for tokens that the policy loss skips
    groups: torch.Tensor  # [s] group of a sequence, numbered within the micro batch
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
    routing: tuple[int, int] | None = None,
    share_prompts: bool = False,
) -> MicroBatch:
    """Pack the samples at `indices` into the micro batch of this context-parallel rank.

    `routing`: layers and experts per token, if any sample of the step has a given routing. `share_prompts`: neighbours
    in a group share what both begin with, which requires a CP of 1.
    """
    chosen = [samples[i] for i in indices]
    layout = lay_out(chosen, align, share_prompts)
    lengths = layout.lengths
    tokens, targets, predicting = _pack(chosen, layout)
    shown, of_images = pack_images(chosen, layout)
    held = [torch.tensor(zigzag_positions(lengths, rank, cp_size)) for rank in range(cp_size)]
    local = held[cp_rank]
    computed = [_rows_held(predicting, rank_positions, tokens.shape[0]) for rank_positions in held]
    order = torch.empty_like(targets)
    order[torch.cat([numbers for numbers, _ in computed])] = torch.arange(targets.shape[0])
    numbers, places = computed[cp_rank]

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        # Copies from pinned memory do not block the host while the GPU still runs the previous micro batch.
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    counts = tuple(sample.trained for sample in chosen)
    number = {group: place for place, group in enumerate(dict.fromkeys(sample.group for sample in chosen))}
    keys = [segment.keys for segment in layout.segments]
    shared = SharedKeys(to_device(layout.key_places()), to_device(_starts(keys)), max(keys)) if layout.shares else None

    def per_token(values: Sequence[Sequence[float] | None], name: str) -> torch.Tensor | None:
        if all(v is None for v in values):
            return None
        flat: list[float] = []
        for value, length in zip(values, counts, strict=True):
            if value is None or len(value) != length:
                given = "none" if value is None else str(len(value))
                raise ValueError(f"{name} log-probs: {given} given for a completion of {length} trained tokens")
            flat += value
        return to_device(torch.tensor(flat, dtype=torch.float32))

    return MicroBatch(
        indices=tuple(indices),
        inputs=ModelInputs(
            input_ids=to_device(tokens[local][None]),
            packed_ids=to_device(tokens[None]),
            position_ids=to_device(_positions(chosen, layout)[..., None, local]),
            cu_seqlens=to_device(_starts(lengths)),
            max_seqlen=max(lengths),
            head_positions=to_device(places),
            head_targets=to_device(tokens[targets[numbers]]),
            cp_counts=tuple(numbers.shape[0] for numbers, _ in computed),
            cp_order=to_device(order),
            images=PackedImages(shown, to_device(of_images[None])) if shown else None,
            shared=shared,
            routing=None if routing is None else to_device(pack_routing(chosen, layout, routing)[local]),
        ),
        counts=counts,
        lengths=to_device(torch.tensor(counts)),
        completion_lengths=to_device(torch.tensor(_completion_lengths(chosen, counts, step))),
        advantages=to_device(torch.tensor([a for s in chosen for a in s.advantages], dtype=torch.float32)),
        old_logprobs=per_token([s.old_logprobs for s in chosen], "old"),
        ref_logprobs=per_token([s.ref_logprobs for s in chosen], "reference"),
        teacher_ratios=per_token([s.teacher_ratios for s in chosen], "teacher"),
        teacher_logprobs=per_token([s.teacher_logprobs for s in chosen], "teacher"),
        rollout_logprobs=per_token([s.rollout_logprobs for s in chosen], "rollout"),
        sft_weights=per_token([s.sft_weights for s in chosen], "SFT"),
        selected=per_token([s.selected for s in chosen], "selected"),
        groups=to_device(torch.tensor([number[sample.group] for sample in chosen])),
        num_groups=len(number),
        step=step,
    )


def _completion_lengths(samples: Sequence[Sample], counts: Sequence[int], step: Normalisers) -> list[int]:
    return [step.tokens_of.get(sample.completion, own) for sample, own in zip(samples, counts, strict=True)]


def _pack(samples: Sequence[Sample], layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens [n] of the packed micro batch, and the places [m] of trained tokens and of what predicts them.

    The first token behind a shared prefix is predicted by the prefix's last one. A shared token is trained once for
    each sample, by the advantage of that sample.
    """
    # Padding follows its segment, so a causal mask hides it, and any token will do.
    tokens = np.zeros(layout.total, np.int64)  # numpy takes short lists in a third of torch's time
    for segment in layout.segments:
        sample = samples[segment.sample]
        end = segment.start + segment.end - segment.begin
        tokens[segment.start : end] = sample.tokens[segment.begin : segment.end]
    targets, predicting = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number, sample in enumerate(samples):
        mask = sample.completion_mask
        if True not in mask:
            continue
        first = mask.index(True)
        if first == 0:
            raise ValueError("the first token of a sequence cannot be trained: a prompt needs at least one token")
        [trained] = np.asarray(mask[first:], np.bool_).nonzero()
        places = layout.places(number)[first - 1 :].numpy()
        targets.append(places[trained + 1])
        predicting.append(places[trained])
    of_targets, before = torch.from_numpy(np.concatenate(targets)), torch.from_numpy(np.concatenate(predicting))
    return torch.from_numpy(tokens), of_targets, before


def _positions(samples: Sequence[Sample], layout: PackedLayout) -> torch.Tensor:
    """Return the positions of all tokens in their sequences: [n], or [3, n] if there are images with axes."""
    if not any(placed.image.has_axes for sample in samples for placed in sample.images):
        return torch.from_numpy(np.concatenate([np.arange(part.begin, part.keys) for part in layout.segments]))
    return torch.cat(
        [positions_of(segment.keys, samples[segment.sample].images)[:, segment.begin :] for segment in layout.segments],
        dim=1,
    )


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _rows_held(rows: torch.Tensor, held: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [m] that a rank holds, as indices into `rows` and as positions on the rank."""
    place = torch.full((total,), -1)
    place[held] = torch.arange(held.shape[0])
    numbers = (place[rows] >= 0).nonzero()[:, 0]
    return numbers, place[rows[numbers]]

"""Shared tokens: their order, what each token attends to and is predicted by, and the samples that can share."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.packing.segments import LEAST_TRAINED, lay_out, shared_with_previous
from swift_megatron_grpo.types import ModelImage, PlacedImage, Sample

CPU = torch.device("cpu")
PLAIN = Alignment(1, 1)


def sample(prompt: list[int], completion: list[int], group: int = 0, **more: object) -> Sample:
    mask = [False] * len(prompt) + [True] * len(completion)
    return Sample(prompt + completion, mask, 1.0, group, **more)  # type: ignore[arg-type]


TWO = [sample([1, 2, 3], [4, 5]), sample([1, 2, 3], [6]), sample([1, 2, 3], [7, 8, 9]), sample([5], [6, 7], 1)]


def test_two_groups_by_hand() -> None:
    inputs = collate(TWO, range(4), count(TWO), Alignment(1, 4), 0, 1, CPU, share_prompts=True).inputs
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 3, 4, 5, 0, 1, 2]]
    assert inputs.cu_seqlens.tolist() == [0, 3, 5, 6, 9, 12] and inputs.max_seqlen == 3
    assert inputs.head_positions.tolist() == [2, 3, 2, 2, 6, 7, 9, 10]
    assert inputs.head_targets.tolist() == [4, 5, 6, 7, 8, 9, 6, 7]
    assert inputs.shared is not None and inputs.shared.max_seqlen == 6
    assert inputs.shared.cu_seqlens.tolist() == [0, 3, 8, 12, 18, 21]
    assert inputs.shared.places.tolist() == [
        *(0, 1, 2), *(0, 1, 2, 3, 4), *(0, 1, 2, 5), *(0, 1, 2, 6, 7, 8), *(9, 10, 11)
    ]  # fmt: skip


def test_padding_belongs_to_the_last_segment() -> None:
    inputs = collate(TWO[:3], range(3), count(TWO), Alignment(1, 8), 0, 1, CPU, share_prompts=True).inputs
    assert inputs.cu_seqlens.tolist() == [0, 3, 5, 6, 16] and inputs.position_ids[0, -1] == 12
    assert inputs.shared is not None and inputs.shared.cu_seqlens.tolist() == [0, 3, 8, 12, 25]
    assert inputs.shared.places[-10:].tolist() == [*range(6, 16)]


def test_repeated_prompts_are_packed_as_whole_sequences() -> None:
    inputs = collate(TWO, range(4), count(TWO), PLAIN, 0, 1, CPU).inputs
    assert inputs.shared is None and inputs.cu_seqlens.tolist() == [0, 5, 9, 15, 18]


def test_other_prompts_of_a_group_are_not_shared() -> None:
    samples = [*TWO[:2], sample([1, 9, 3], [4]), sample([1, 9, 3], [5]), sample([1, 9, 3], [5], 2)]
    assert shared_with_previous(samples).tolist() == [0, 3, 1, 3, 0]
    assert shared_with_previous([sample([1], [2]), sample([3], [2])]).tolist() == [0, 0]


def test_a_completion_that_is_not_trained_shares_its_prompt_as_well() -> None:
    samples = [sample([1, 2, 3], [4, 5]), sample([1, 2, 3, 4, 6], []), sample([1, 2, 3], [4, 5])]
    assert shared_with_previous(samples).tolist() == [0, 3, 3]  # although the second begins with a token of the first
    assert shared_with_previous(samples[1:2] * 2).tolist() == [0, 4]  # nothing is trained; one token each is left


TURN = [*range(10, 10 + LEAST_TRAINED)]  # tokens of a first turn, enough to be shared


def test_a_tree_by_hand() -> None:
    """A turn that is trained in two completions with their own advantages, and a sequence that reads it."""
    first, second = sample([1, 2], [*TURN, 40, 41]), sample([1, 2], [*TURN, 50])
    reads = Sample([1, 2, *TURN, 50, 60, 61], [False] * (3 + len(TURN)) + [True] * 2, 1.0, 0)
    samples = [first, second, reads, sample([1, 2], [70])]
    assert shared_with_previous(samples).tolist() == [0, 2 + len(TURN), 2 + len(TURN), 2]
    layout = lay_out(samples, PLAIN, share_prompts=True)
    assert [(part.begin, part.end, part.prefix) for part in layout.segments] == [
        (0, 2, None), (2, 18, 0), (18, 20, 1), (18, 19, 1), (18, 21, 1), (2, 3, 0)
    ]  # fmt: skip
    batch = collate(samples, range(4), count(samples), PLAIN, 0, 1, CPU, share_prompts=True)
    assert batch.inputs.input_ids.tolist() == [[1, 2, *TURN, 40, 41, 50, 50, 60, 61, 70]]
    turn = [*range(1, 17)]  # is predicted twice
    assert batch.inputs.head_positions.tolist() == [*turn, 17, 18, *turn, 17, 21, 22, 1]
    assert batch.inputs.head_targets.tolist() == [*TURN, 40, 41, *TURN, 50, 60, 61, 70]
    assert batch.counts == (18, 17, 2, 1)


def test_few_trained_tokens_are_not_shared() -> None:
    short = [sample([1, 2], [*TURN[:-1], 40]), sample([1, 2], [*TURN[:-1], 50])]
    assert shared_with_previous(short).tolist() == [0, 2]


def no_pixels() -> torch.Tensor:
    raise AssertionError("pixels are read by towers only")


def test_an_image_is_shared_as_a_whole_or_not_at_all() -> None:
    image, other = (ModelImage(d, (1, 2, 4), 2, ((1.0, 0.0),) * 3, no_pixels) for d in "ab")  # two tokens each
    prompt = [1, 7, 7, 2, 7, 7, 3]
    first, second = PlacedImage(image, 1), PlacedImage(image, 4)
    same = [sample(prompt, [4], images=(first, second)), sample(prompt, [5], images=(first, second))]
    assert shared_with_previous(same).tolist() == [0, 7]
    inputs = collate(same, range(2), count(same), PLAIN, 0, 1, CPU, share_prompts=True).inputs
    assert inputs.images is not None and inputs.images.shown == (image, image)
    assert inputs.images.mask.nonzero()[:, 1].tolist() == [1, 2, 4, 5]
    whole = collate(same[:1], [0], count(same), PLAIN, 0, 1, CPU).inputs.position_ids[:, 0]
    assert torch.equal(inputs.position_ids[:, 0, :8], whole) and torch.equal(inputs.position_ids[:, 0, 8], whole[:, -1])

    differs = [same[0], sample(prompt, [5], images=(first, PlacedImage(other, 4)))]
    assert shared_with_previous(differs).tolist() == [0, 4]
    longer = [same[0], sample([1, 7, 7, 2, 7, 7, 7, 3], [5], images=(first,))]  # it sampled or wrote the token
    assert shared_with_previous(longer).tolist() == [0, 4]


@st.composite
def steps(draw: st.DrawFn) -> list[Sample]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    samples: list[Sample] = []
    for group in range(draw(st.integers(1, 4))):
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 6))]
        for number in range(rng.randint(1, 5)):
            one = sample(prompt, [rng.randrange(9) for _ in range(rng.randint(1, 5))], group)
            if number and rng.random() < 0.5:  # it continues a part of the one before
                kept = rng.randint(1, samples[-1].length)
                one.tokens = samples[-1].tokens[:kept] + one.tokens[1:]
                one.completion_mask = [False, *(rng.random() < 0.7 for _ in one.tokens[1:])]
            if rng.random() < 0.3:
                one = replace(one, tokens=one.tokens + TURN, completion_mask=one.completion_mask + [True] * len(TURN))
            if rng.random() < 0.2:
                one.tokens[rng.randrange(len(one.tokens))] = 9
            if rng.random() < 0.2:
                one.completion_mask = [False] * len(one.tokens)
            samples.append(replace(one))
    return samples


@given(steps(), st.sampled_from([PLAIN, Alignment(1, 4)]))
def test_every_token_attends_to_and_is_predicted_by_what_it_was(samples: list[Sample], align: Alignment) -> None:
    layout = lay_out(samples, align, share_prompts=True)
    inputs = collate(samples, range(len(samples)), count(samples), align, 0, 1, CPU, share_prompts=True).inputs
    tokens, positions = inputs.input_ids[0], inputs.position_ids[0]
    keys = layout.key_places()
    targets = iter(zip(inputs.head_positions.tolist(), inputs.head_targets.tolist(), strict=True))
    starts = inputs.shared.cu_seqlens if inputs.shared is not None else inputs.cu_seqlens
    for number, one in enumerate(samples):
        places = layout.places(number)
        assert tokens[places].tolist() == one.tokens
        assert positions[places].tolist() == list(range(len(one.tokens)))
        for i, trained in enumerate(one.completion_mask):
            assert not trained or next(targets) == (places[i - 1], one.tokens[i])
    assert next(targets, None) is None and layout.total % align.total == 0
    for index, segment in enumerate(layout.segments):
        attended = keys[starts[index] : starts[index + 1]]
        own = samples[segment.sample].tokens[: segment.end]
        assert tokens[attended][: len(own)].tolist() == own and len(attended) == segment.keys


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_shared_tokens_take_the_experts_of_the_first_sample_that_has_some(rows: int) -> None:
    import numpy as np

    from swift_megatron_grpo.packing.routing import pack_routing, unpack_routing

    samples = [sample([1, 2, 3], [4, 5]), sample([1, 2, 3], [6, 7]), sample([1, 2, 3], [8, 9])]
    samples[1].routed_experts = np.arange(rows)[:, None, None] + np.array([[[10]]])
    samples[2].routed_experts = np.arange(4)[:, None, None] + np.array([[[20]]])
    layout = lay_out(samples, PLAIN, share_prompts=True)
    packed = pack_routing(samples, layout, (1, 1))
    own, prompt = [10 + i if i < rows else -1 for i in range(3, 5)], [10 + i if i < rows else 20 + i for i in range(3)]
    assert packed[:, 0, 0].tolist() == [*prompt, -1, -1, *own, 23, -1]
    unpacked = unpack_routing(packed, [0], samples, layout, 1)
    assert [part[:, 0, 0].tolist() for part in unpacked] == [[*prompt, -1, -1], [*prompt, *own], [*prompt, 23, -1]]

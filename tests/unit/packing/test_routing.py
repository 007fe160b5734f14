"""Given experts are packed like the tokens, and a packed recording is split into the rows of its samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.plan import Alignment, zigzag_positions
from swift_megatron_grpo.packing.routing import pack_routing, routing_shape, unpack_routing
from swift_megatron_grpo.packing.segments import PackedLayout, Segment, lay_out
from swift_megatron_grpo.types import ExpertRows, Sample

LAYERS, K = 3, 2


def experts(rows: int, first: int = 0, dtype: type = np.uint8) -> ExpertRows:
    return (first + np.arange(rows * LAYERS * K)).reshape(rows, LAYERS, K).astype(dtype)


def sample(tokens: int, rows: ExpertRows | None) -> Sample:
    return Sample(list(range(1, tokens + 1)), [False] + [True] * (tokens - 1), 1.0, routed_experts=rows)


def padded(samples: list[Sample], rooms: list[int]) -> PackedLayout:
    """Return the layout of whole sequences with this room."""
    starts = [sum(rooms[:i]) for i in range(len(rooms))]
    return PackedLayout(tuple(Segment(i, 0, len(s.tokens), starts[i], rooms[i]) for i, s in enumerate(samples)))


SAMPLES = [sample(5, experts(4)), sample(3, None), sample(4, experts(4, 100, np.uint16)), sample(6, experts(2, 200))]


def test_tokens_without_a_row_and_padding_leave_the_choice_to_the_router() -> None:
    packed = pack_routing(SAMPLES, padded(SAMPLES, [6, 4, 4, 8]), (LAYERS, K))
    assert packed.shape == (22, LAYERS, K) and packed.dtype == torch.int16
    chosen = (packed >= 0).all(-1).all(-1).tolist()
    assert chosen == [True] * 4 + [False] * 6 + [True] * 4 + [True] * 2 + [False] * 6
    assert np.array_equal(packed[:4].numpy(), experts(4)) and np.array_equal(packed[10:14].numpy(), experts(4, 100))


def test_256_experts_fit_beside_rows_without_a_choice() -> None:
    rows = np.full((1, LAYERS, K), 255, np.uint8)
    packed = pack_routing([sample(2, rows)], padded([sample(2, rows)], [2]), (LAYERS, K))
    assert packed[0].unique().tolist() == [255] and packed[1].unique().tolist() == [-1]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_micro_batch_has_the_experts_of_the_tokens_that_its_rank_holds(cp_size: int) -> None:
    align, shape = Alignment.of_layout(1, cp_size, False), routing_shape(SAMPLES)
    device = torch.device("cpu")
    batches = [collate(SAMPLES, [0, 2], count(SAMPLES), align, rank, cp_size, device, shape) for rank in range(cp_size)]
    chosen = [SAMPLES[0], SAMPLES[2]]
    lengths = batches[0].inputs.cu_seqlens.diff().tolist()
    packed = pack_routing(chosen, lay_out(chosen, align, False), (LAYERS, K))
    for rank, batch in enumerate(batches):
        assert batch.inputs.routing is not None
        assert torch.equal(batch.inputs.routing, packed[zigzag_positions(lengths, rank, cp_size)])


def test_samples_without_routing_have_none() -> None:
    assert routing_shape([sample(3, None)]) is None
    batch = collate([sample(3, None)], [0], count(SAMPLES), Alignment.of_layout(1, 1, False), 0, 1, torch.device("cpu"))
    assert batch.inputs.routing is None


def test_a_recording_is_split_into_samples_without_their_padding() -> None:
    packed = pack_routing(SAMPLES, padded(SAMPLES, [6, 4, 4, 8]), (LAYERS, K))[:, [0, 2]]
    first, none, third, last = unpack_routing(packed, [0, 2], SAMPLES, padded(SAMPLES, [6, 4, 4, 8]), LAYERS)
    assert [len(rows) for rows in (first, none, third, last)] == [5, 3, 4, 6]
    assert np.array_equal(first[:4, [0, 2]], experts(4)[:, [0, 2]]) and (first[:, 1] == -1).all()
    assert (none == -1).all() and np.array_equal(last[:2, 0], experts(2, 200)[:, 0])


def test_rows_that_no_sample_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens has 4 rows"):
        pack_routing([sample(3, experts(4))], padded([sample(3, experts(4))], [4]), (LAYERS, K))
    with pytest.raises(ValueError, match="differs in layers"):
        routing_shape([sample(3, experts(2)), sample(3, experts(2)[:, :1])])

"""Layers of experts keep the rows that a rank receives: with expert parallelism as many as without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_megatron_grpo.cli.estimate.activations import Decoder, Recompute, Tokens, bytes_of_layers
from swift_megatron_grpo.settings.layout import Layout

HIDDEN, FFN, TAKEN = 64, 32, 2
TOKENS = Tokens(1024, 1024, 1024)
WITHOUT = Decoder(1, HIDDEN, HIDDEN, HIDDEN, 0, 256, False)
EXPERTS = replace(WITHOUT, expert_layers=frozenset([0]), expert_ffn=FFN, experts_per_token=TAKEN)
ROWS = TOKENS.packed * TAKEN


def kept(layout: Layout, how: Recompute | None = None) -> float:
    """Return the bytes of the experts of one layer."""
    one, other = (bytes_of_layers(decoder, [0], TOKENS, layout, how or Recompute()) for decoder in (EXPERTS, WITHOUT))
    return one.kept - other.kept


def test_expert_parallel_ranks_keep_as_many_rows_as_one_rank() -> None:
    of_row = 2 * (HIDDEN + 2 * FFN + FFN)
    assert kept(Layout(1)) == ROWS * of_row
    assert kept(Layout(2, expert_model_parallel_size=2)) == ROWS * of_row


def test_tensor_parallel_ranks_divide_the_rows() -> None:
    divided = Layout(2, tensor_model_parallel_size=2, sequence_parallel=True)
    assert kept(divided) == kept(Layout(1)) / 2
    assert kept(replace(divided, expert_model_parallel_size=2)) == kept(Layout(1)) / 2


def test_expert_tensor_parallel_ranks_have_all_inputs_and_part_of_width() -> None:
    layout = Layout(2, tensor_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True)
    assert kept(layout) == ROWS * 2 * (HIDDEN + (2 * FFN + FFN) / 2)


@pytest.mark.parametrize("module", ["moe", "mlp"])
def test_recomputed_experts_keep_nothing(module: str) -> None:
    assert kept(Layout(2, expert_model_parallel_size=2), Recompute("selective", modules=(module,))) == 0

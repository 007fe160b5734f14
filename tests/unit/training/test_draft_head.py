"""The loss of a layer that drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_megatron_grpo.training import draft_head
from swift_megatron_grpo.training.draft_head import DraftHead


def test_a_step_without_trained_tokens_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "frozen_log_probs", lambda *_: torch.zeros(0))
    head: Any = object.__new__(DraftHead)
    head._layer = lambda **_: (torch.zeros(3, 1, 2),)
    head._model = head._parallel = None
    head._embed = None
    nothing = torch.zeros(0, dtype=torch.int64)
    inputs = SimpleNamespace(head_positions=nothing, head_targets=nothing, position_ids=torch.arange(3)[None])
    batch: Any = SimpleNamespace(inputs=inputs, step=SimpleNamespace(tokens=0, sft_tokens=0))
    names = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin",
             "packed_seq_params", "sequence_len_offset")  # fmt: skip
    assert head._loss(torch.zeros(3, 1, 2), dict.fromkeys(names), batch, 1.0).item() == 0

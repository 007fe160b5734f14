"""flash-linear-attention is hidden from a rank whose model cannot use it, and from no other rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.plugin.rank import leave_out_linear_attention

DENSE = {"model_type": "llama", "rope_parameters": {"rope_type": "default"}, "layer_types": ["full_attention"]}
DELTA = {"model_type": "qwen3_5", "text_config": {"linear_num_key_heads": 2}}
HYBRID = {"model_type": "bailing_hybrid"}


@pytest.mark.parametrize(
    ("config", "flags", "is_hidden"),
    [(DENSE, [], True), (DELTA, [], False), (HYBRID, [], False), (DENSE, ["--reward_model", "r"], False)],
)
def test_it_is_hidden_only_where_no_model_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], flags: list[str], is_hidden: bool
) -> None:
    monkeypatch.setitem(sys.modules, "fla", sys)  # restored after the test
    (tmp_path / "config.json").write_text(json.dumps(config))
    leave_out_linear_attention(["rlhf.py", "--model", str(tmp_path), *flags])
    assert (sys.modules["fla"] is None) == is_hidden


def test_a_model_of_a_hub_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", sys)
    leave_out_linear_attention(["rlhf.py", "--model", "Qwen/Qwen3-8B"])
    assert sys.modules["fla"] is sys

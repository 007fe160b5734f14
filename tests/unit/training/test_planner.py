"""Plans of the passes of one step: every model runs a completion on the rank that trains it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.training.planner import EngineSettings, Planner
from swift_megatron_grpo.types import Sample


def planner(layers: int, hidden: int, ffn: int, heads: int) -> Planner:
    config: Any = SimpleNamespace(
        num_moe_experts=None, num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads,
        padded_vocab_size=151_936, num_query_groups=8, kv_channels=128, gated_linear_unit=True,
        experimental_attention_variant=None,
    )  # fmt: skip
    position: Any = SimpleNamespace(dp_size=2, pp_size=1)
    return Planner(config, position, Alignment(1, 1), 1)


def samples(seed: int) -> list[Sample]:
    """Return the completions of 8 prompts, 8 of each, of log-normal lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(8):
        prompt = [group] * int(rng.integers(50, 400))
        for number in range(8):
            length = int(np.clip(rng.lognormal(6.5, 0.8), 8, 4000))
            mask = [False] * len(prompt) + [True] * length
            completion = [100 + number] * length
            found.append(Sample(prompt + completion, mask, 1.0, group=group, completion=8 * group + number))
    return found


def test_a_larger_teacher_may_run_completions_on_other_ranks() -> None:
    """Its log-probs are gathered therefore: tests/unit/loop/test_assemble.py."""
    student, teacher = planner(28, 2048, 6144, 16), planner(36, 4096, 12288, 32)  # Qwen3-1.7B and Qwen3-8B
    settings = EngineSettings(temperature=1.0, max_tokens=8192, share_prompts_from=0.05)
    moved = [
        int((student.plan(step, settings).rank_of_samples() != teacher.plan(step, settings).rank_of_samples()).sum())
        for step in map(samples, range(5))
    ]
    assert any(moved)

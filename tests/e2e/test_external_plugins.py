"""`--external_plugins` with the plugin's path, where the entry point does not put the trainer in."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.autoload import VARIABLE
from swift_megatron_grpo.external import PATH
from tests.e2e.runs import REWARDS, make_dataset, make_model, megatron_rlhf

pytestmark = pytest.mark.e2e


def test_it_trains_with_our_trainer_and_its_flags_at_their_defaults(tmp_path: Path) -> None:
    """ms-swift's own class has parsed by the time the plugin is imported; the reward comes from a second plugin."""
    model, dataset = make_model(tmp_path / "model"), make_dataset(tmp_path / "data.jsonl")
    flags = ["--external_plugins", PATH, str(REWARDS)]
    run = megatron_rlhf(model, dataset, tmp_path / "run", 1, flags, environment={VARIABLE: "platform"})
    assert run.code == 0, run.output[-4000:]
    assert "trains this run" in run.output
    assert len(run.log) == 2 and run.log[0]["actor/approxkl"] == 0

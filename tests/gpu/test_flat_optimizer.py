"""Steps of Transformer Engine's Adam over runs of parameters give the weights of steps over single ones, bit by bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from swift_megatron_grpo.tools.check_layouts import base_flags, launch, task
from tests.dist.test_flat_optimizer import ALL_EXPERTS, LONGER
from tests.e2e.runs import SIZE_FOR_GPUS, make_model

pytestmark = pytest.mark.gpu
CASES = {"adapters": ("moe", "lora", ALL_EXPERTS), "all weights": ("dense", "full", ["--beta", "0.1"])}


@pytest.mark.parametrize("case", list(CASES))
def test_steps_equal_those_over_single_parameters(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, tuner, extra = CASES[case]
    settings = argparse.Namespace(
        model=str(make_model(tmp_path / "model", kind, SIZE_FOR_GPUS)), tuner=tuner, dtype="bfloat16",
        attention_backend="fused", extra=[*extra, *LONGER],
    )  # fmt: skip
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    flags = base_flags(settings, str(tmp_path))
    launch(1, [task("tests.dist.flat_optimizer:main", out=str(tmp_path / "steps"), flags=flags)], tmp_path)
    report = json.loads((tmp_path / "steps.0.json").read_text())
    assert 0 < report["runs"] < report["tensors"]
    for runs in ("upstream again", "same steps", "a checkpoint of upstream", "a checkpoint of runs"):
        assert report[runs]["losses_equal"] and report[runs]["trained"], report
        assert report[runs]["norms_off"] < 1e-5, report
        assert report[runs]["weights_differ"] == [], report

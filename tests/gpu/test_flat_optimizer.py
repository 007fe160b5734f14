"""Steps of Transformer Engine's Adam over runs of parameters give the weights of steps over single ones, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.cli.check_layouts.layouts import base_flags, launch, task
from tests.dist.test_flat_optimizer import ALL_EXPERTS, LONGER, UNCLIPPED
from tests.support.runs import SIZE_FOR_GPUS, make_model

pytestmark = pytest.mark.gpu
CASES = {
    "adapters": ("moe", "lora", [*ALL_EXPERTS, *UNCLIPPED]),
    "all weights": ("dense", "full", ["--beta", "0.1", *UNCLIPPED]),
}
COMPARED = ("upstream again", "same steps", "a checkpoint of upstream", "a checkpoint of runs")


def report_of(kind: str, tuner: str, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = str(make_model(tmp_path / "model", kind, SIZE_FOR_GPUS))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    flags = base_flags(model, str(tmp_path), tuner, "bfloat16", attention_backend="fused", extra=[*extra, *LONGER])
    launch(1, [task("tests.programs.dist.flat_optimizer:main", out=str(tmp_path / "steps"), flags=flags)], tmp_path)
    report = json.loads((tmp_path / "steps.0.json").read_text())
    print(json.dumps(report, indent=1))
    assert 0 < report["runs"] < report["tensors"]
    return report


@pytest.mark.parametrize("case", list(CASES))
def test_steps_equal_those_over_single_parameters(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(*CASES[case], tmp_path, monkeypatch)
    for runs in COMPARED:
        assert report[runs]["losses_equal"] and report[runs]["trained"], runs
        assert report[runs]["norms_off"] < 1e-6, runs
        assert report[runs]["weights_differ"] == [], runs


def test_clipped_gradients_differ_by_the_last_bit_of_the_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of base_flags clip to 0.05. A weight that is rounded the other way changes the later norms."""
    report = report_of("moe", "lora", ALL_EXPERTS, tmp_path, monkeypatch)
    for runs in COMPARED:
        assert report[runs]["trained"], runs
        assert report[runs]["first_norm_off"] < (1e-6 if runs in ("upstream again", "same steps") else 1e-3), runs
        assert report[runs]["norms_off"] < 1e-3, runs

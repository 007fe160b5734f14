"""The arguments of the comparison of vLLM's settings."""

from __future__ import annotations

import pytest

from benchmarks.bench_generation import WORKLOAD, parse

FILE = ["--json", "generation.json"]


def test_a_variant_that_compiles_is_refused_with_eager(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([*FILE, "--eager", "--variants", "default", "graphs_alone"])
    assert "--eager turns off what graphs_alone would set of vLLM's compilation" in capsys.readouterr().err


@pytest.mark.parametrize("eager", [[], ["--eager"]])
def test_other_variants_run_with_eager_and_without(eager: list[str]) -> None:
    assert parse([*FILE, *eager, "--variants", "default", "fp8_per_channel"]).eager is bool(eager)
    assert parse([*FILE, "--variants", "graphs_alone"]).variants == ["graphs_alone"]


def test_the_results_have_the_arguments_that_change_them() -> None:
    settings = vars(parse(FILE))
    elsewhere = {"json", "variants", "profile", "timeout", "work", "only"}  # in the results, or without effect on them
    assert set(WORKLOAD) == set(settings) - elsewhere

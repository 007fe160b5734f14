"""A model of which no weight is trained is refused as soon as it is built, with the flags that freeze it."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks


@pytest.mark.dist
def test_a_model_that_is_frozen_as_a_whole_is_refused_on_every_rank(ranks: Ranks) -> None:
    """Flags are checked with the names of the whole model, in which layer 3 is the last; a stage counts from 0."""
    extra = ["--freeze_parameters_regex", ".*", "--trainable_parameters_regex", r"layers\.3\."]
    extra += ["--pipeline_model_parallel_size", "2"]
    ranks.call("frozen", "broken_models:build", 2, ranks.flags("dense", "full", "float32", extra))
    for rank in (0, 1):
        error = ranks.report("frozen", rank)["error"]
        assert error.startswith("ValueError: none of the model's weights (")
        assert "is trained: --freeze_parameters_regex .*; freeze fewer of them" in error


@pytest.mark.dist
def test_a_pipeline_stage_may_be_frozen(ranks: Ranks) -> None:
    extra = ["--freeze_parameters_regex", ".*", "--trainable_parameters_regex", ".*final_layernorm.*"]
    flags = ranks.flags("dense", "full", "float32", [*extra, "--pipeline_model_parallel_size", "2"])
    ranks.call("last-stage", "broken_models:build", 2, flags)
    assert [ranks.report("last-stage", rank)["error"] for rank in (0, 1)] == ["", ""]

"""Ten golden steps; inference in other micro batches; unusual batches; the reference in its own layout."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.dist.conftest import REFERENCE_LAYOUTS, Ranks
from tests.paths import GOLDEN
from tests.support.choice import rest_nightly
from tests.support.runs import first_weights

pytestmark = pytest.mark.dist


VPP = ["--pipeline_model_parallel_size", "2", "--virtual_pipeline_model_parallel_size", "2"]
OTHER_MICRO_BATCHES = [{"infer_max_tokens": 64}, {"infer_max_tokens": 400}, {"infer_micro_batch_size": 1},
                       {"infer_micro_batch_size": 8}]  # fmt: skip


def inference(ranks: Ranks, run: str, rank: int) -> dict[str, Any]:
    """Compute log-probs in micro batches of other sizes, on one rank or in an interleaved pipeline of two."""
    one = run == "inference-one"
    ranks.engine(run, "inference", 1 if one else 2, [] if one else VPP, others=OTHER_MICRO_BATCHES)
    return ranks.report(run, rank)


def test_ten_steps_match_the_golden_file(ranks: Ranks) -> None:
    """After an intended change of results, write `steps` of the new run to the golden file, and say why."""
    ranks.engine("golden", "golden", 1)
    steps = ranks.report("golden", 0)["steps"]
    golden = json.loads((GOLDEN / "dense_ten_steps.json").read_text())["steps"]
    assert len(steps) == len(golden) == 10
    for step, expected in zip(steps, golden, strict=True):
        for name, value in expected.items():
            assert step[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_stand_in_matches_the_golden_file_of_the_gpu_tests(ranks: Ranks, kind: str) -> None:
    """tests/gpu/test_layouts.py compares real Transformer Engine with the same file.

    After an intended change of results, write the report of `one_step` and the model's first weights to the file.
    """
    ranks.engine(f"{kind}-step", "one_step", 1, kind=f"{kind}-for-gpus")
    step, golden = ranks.report(f"{kind}-step", 0), json.loads((GOLDEN / f"{kind}_step.json").read_text())
    assert first_weights(ranks.model(f"{kind}-for-gpus")) == pytest.approx(golden["first_weights"], rel=1e-6)
    for name, value in golden["metrics"].items():
        assert step["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for index, (logprobs, entropies) in golden["values"].items():
        assert step["values"][index][0] == pytest.approx(logprobs, abs=1e-5)
        assert step["values"][index][1] == pytest.approx(entropies, abs=1e-5)
    if kind == "dense":  # forward and backward: six for a weight and token, and attention scores
        assert 6 * step["products"] < step["flops"] < 6.6 * step["products"]


@pytest.mark.parametrize(("run", "rank"), [("inference-one", 0), ("inference", 1)])
def test_inference_does_not_depend_on_micro_batches(ranks: Ranks, run: str, rank: int) -> None:
    """`inference` runs an interleaved pipeline, whose last stage, rank 1, has the results."""
    report = inference(ranks, run, rank)
    first, *others = report["passes"]
    assert sorted(map(int, first)) == list(range(8)) and len(others) == 4
    for index, (logprobs, entropies) in first.items():
        assert len(logprobs) == len(entropies) == report["lengths"][int(index)]
        assert all(value < 0 for value in logprobs) and all(value > 0 for value in entropies)
        for other in others:
            assert other[index][0] == pytest.approx(logprobs, abs=1e-6)
            assert other[index][1] == pytest.approx(entropies, abs=2e-6)
    assert report["without_entropy"] == [None] * 8


def test_inference_in_a_pipeline_matches_one_rank(ranks: Ranks) -> None:
    one, pipeline = inference(ranks, "inference-one", 0)["passes"][0], inference(ranks, "inference", 1)["passes"][0]
    assert inference(ranks, "inference", 0)["passes"][0] == {}
    for index in one:
        assert pipeline[index][0] == pytest.approx(one[index][0], abs=1e-6)
        assert pipeline[index][1] == pytest.approx(one[index][1], abs=2e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_unusual_batches_train_or_raise_clear_errors(ranks: Ranks, rank: int) -> None:
    ranks.engine("odd_batches", "odd_batches", 2, ["--lr", "1e-30"])
    report = ranks.report("odd_batches", rank)
    # completions without tokens change nothing, nor does a micro batch of only such completions
    assert report["empty"]["loss"] == pytest.approx(report["without"]["loss"], abs=1e-6)
    assert report["empty"]["grad_norm"] == pytest.approx(report["without"]["grad_norm"], rel=1e-6)
    assert math.isfinite(report["length_one"]["loss"]) and report["length_one"]["grad_norm"] > 0
    assert "1 completions cannot be split over 2 data-parallel ranks" in report["too_few"]
    assert "0 completions cannot be split" in report["none"]
    assert "outputs must be ('logprob',) or ('logprob', 'entropy'), got ('entropy',)" in report["outputs"]
    assert "the loss function returned loss = a tensor of shape [" in report["shape"]
    assert "the loss function returned kl = 0.5; the loss and every metric must be tensors" in report["metric"]
    assert math.isfinite(report["after"]["loss"])


@pytest.mark.parametrize(
    "layouts", rest_nightly(list(REFERENCE_LAYOUTS), ["pp2 vpp2, reference tp2", "ep2, reference cp2"])
)
def test_a_reference_in_its_own_layout_matches_the_trained_model(ranks: Ranks, layouts: str) -> None:
    kind, flags = REFERENCE_LAYOUTS[layouts]
    ranks.engine(layouts, "reference", 2, ["--beta", "0.1", *flags.split()], kind=kind)
    reports = [ranks.report(layouts, rank) for rank in (0, 1)]
    trained = {index: values for report in reports for index, values in report["trained"].items()}
    assert len(trained) == 8
    for report in reports:
        assert len(report["before"]) == 8  # every rank has all of them
        for index, logprobs in trained.items():
            assert report["before"][index] == pytest.approx(logprobs, abs=2e-6)
        assert report["after"] == report["before"]  # frozen
        assert report["step"] == reports[0]["step"] and report["step"]["grad_norm"] > 0


def test_micro_batches_do_not_synchronize_with_the_device_or_other_ranks(ranks: Ranks) -> None:
    ranks.engine("synchronizations", "synchronizations", 1)
    report = ranks.report("synchronizations", 0)
    assert report["2"] == report["8"]  # they happen once per step
    reads, collectives = report["8"]
    assert 0 < reads < 100 and 0 < collectives < 10  # most of them in the optimizer

"""Ten golden steps; inference in other micro batches; batches that are odd."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.dist.conftest import REFERENCE_LAYOUTS, Ranks
from tests.e2e.runs import first_weights
from tests.paths import GOLDEN

pytestmark = pytest.mark.dist


VPP = ["--pipeline_model_parallel_size", "2", "--virtual_pipeline_model_parallel_size", "2"]
OTHER_MICRO_BATCHES = [{"infer_max_tokens": 64}, {"infer_max_tokens": 400}, {"infer_micro_batch_size": 1},
                       {"infer_micro_batch_size": 8}]  # fmt: skip


def inference(ranks: Ranks, run: str, rank: int) -> dict[str, Any]:
    """Log-probs in micro batches of other sizes, on one rank or in an interleaved pipeline of two."""
    one = run == "inference-one"
    ranks.engine(run, "inference", 1 if one else 2, [] if one else VPP, others=OTHER_MICRO_BATCHES)
    return ranks.report(run, rank)


def test_ten_steps_have_the_losses_they_always_had(ranks: Ranks) -> None:
    """To change what is computed on purpose: write `steps` of the new run to the golden file, and say why."""
    ranks.engine("golden", "golden", 1)
    steps = ranks.report("golden", 0)["steps"]
    golden = json.loads((GOLDEN / "dense_ten_steps.json").read_text())["steps"]
    assert len(steps) == len(golden) == 10
    for step, expected in zip(steps, golden, strict=True):
        for name, value in expected.items():
            assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_stand_in_computes_what_gpus_are_compared_with(ranks: Ranks, kind: str) -> None:
    """tests/gpu/test_layouts.py compares real Transformer Engine with the same file.

    To change what is computed on purpose: write the report of `one_step` and the model's first weights to the file.
    """
    ranks.engine(f"{kind}-step", "one_step", 1, kind=f"{kind}-for-gpus")
    step, golden = ranks.report(f"{kind}-step", 0), json.loads((GOLDEN / f"{kind}_step.json").read_text())
    assert first_weights(ranks.model(f"{kind}-for-gpus")) == pytest.approx(golden["first_weights"], rel=1e-6)
    for name, value in golden["metrics"].items():
        assert step["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for index, (logprobs, entropies) in golden["values"].items():
        assert step["values"][index][0] == pytest.approx(logprobs, abs=1e-5)
        assert step["values"][index][1] == pytest.approx(entropies, abs=1e-5)


@pytest.mark.parametrize(("run", "rank"), [("inference-one", 0), ("inference", 1)])
def test_inference_does_not_depend_on_micro_batches(ranks: Ranks, run: str, rank: int) -> None:
    """`inference` runs an interleaved pipeline, whose last stage, rank 1, has the results."""
    found = inference(ranks, run, rank)
    first, *others = found["passes"]
    assert sorted(map(int, first)) == list(range(8)) and len(others) == 4
    for index, (logprobs, entropies) in first.items():
        assert len(logprobs) == len(entropies) == found["lengths"][int(index)]
        assert all(value < 0 for value in logprobs) and all(value > 0 for value in entropies)
        for other in others:
            assert other[index][0] == pytest.approx(logprobs, abs=1e-6)
            assert other[index][1] == pytest.approx(entropies, abs=2e-6)
    assert found["without_entropy"] == [None] * 8


def test_a_pipeline_infers_what_one_rank_infers(ranks: Ranks) -> None:
    one, pipeline = inference(ranks, "inference-one", 0)["passes"][0], inference(ranks, "inference", 1)["passes"][0]
    assert inference(ranks, "inference", 0)["passes"][0] == {}
    for index in one:
        assert pipeline[index][0] == pytest.approx(one[index][0], abs=1e-6)
        assert pipeline[index][1] == pytest.approx(one[index][1], abs=2e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_odd_batches(ranks: Ranks, rank: int) -> None:
    ranks.engine("odd_batches", "odd_batches", 2, ["--lr", "0"])
    found = ranks.report("odd_batches", rank)
    # completions without a token change nothing, nor does a micro batch that has no other
    assert found["empty"]["loss"] == pytest.approx(found["without"]["loss"], abs=1e-6)
    assert found["empty"]["grad_norm"] == pytest.approx(found["without"]["grad_norm"], rel=1e-6)
    assert math.isfinite(found["length_one"]["loss"]) and found["length_one"]["grad_norm"] > 0
    assert "1 completions cannot be split over 2 data-parallel ranks" in found["too_few"]
    assert "0 completions cannot be split" in found["none"]
    assert "outputs must be ('logprob',) or ('logprob', 'entropy'), got ('entropy',)" in found["outputs"]
    assert "the loss function returned loss = a tensor of shape [" in found["shape"]
    assert "the loss function returned kl = 0.5; the loss and every metric must be tensors" in found["metric"]
    assert math.isfinite(found["after"]["loss"])


@pytest.mark.parametrize("layouts", REFERENCE_LAYOUTS)
def test_a_reference_in_a_layout_of_its_own_says_the_same(ranks: Ranks, layouts: str) -> None:
    kind, flags = REFERENCE_LAYOUTS[layouts]
    ranks.engine(layouts, "reference", 2, ["--beta", "0.1", *flags.split()], kind=kind)
    of_ranks = [ranks.report(layouts, rank) for rank in (0, 1)]
    trained = {index: values for of_rank in of_ranks for index, values in of_rank["trained"].items()}
    assert len(trained) == 8
    for of_rank in of_ranks:
        assert len(of_rank["before"]) == 8  # every rank has all of them
        for index, logprobs in trained.items():
            assert of_rank["before"][index] == pytest.approx(logprobs, abs=2e-6)
        assert of_rank["after"] == of_rank["before"]  # frozen
        assert of_rank["step"] == of_ranks[0]["step"] and of_rank["step"]["grad_norm"] > 0


def test_micro_batches_neither_wait_for_the_device_nor_for_other_ranks(ranks: Ranks) -> None:
    ranks.engine("quiet", "quiet", 1)
    found = ranks.report("quiet", 0)
    assert found["2"] == found["8"]  # what there is belongs to the step
    reads, meetings = found["8"]
    assert 0 < reads < 100 and 0 < meetings < 10  # most of them in the optimizer

"""Attention kernels are compared with exact arithmetic before training, and a wrong one ends the run on every rank."""

from __future__ import annotations

import pytest

from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist
CASES = {
    "dense": (1, []),
    "dense-tp2": (2, ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]),
    "dense-cp2": (2, ["--context_parallel_size", "2"]),
    "deepseek": (1, []),
    "qwen3_5-tp2": (2, ["--tensor_model_parallel_size", "2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_a_right_installation_pass(ranks: Ranks, case: str) -> None:
    size, more = CASES[case]
    kind = case.split("-")[0]
    ranks.call(f"attention-{case}", "attention_runs:errors", size, ranks.flags(kind, "full", "float32", more))
    for rank in range(size):
        report = ranks.report(f"attention-{case}", rank)
        assert report["comparable"] and len(report["errors"]) == 4
        assert all(error < 1e-5 for error in report["errors"].values()), report
        assert report["compared"] == report["trained"]  # mcore-bridge pads the values of latent attention
    if kind == "deepseek":
        assert report["sizes"][2] != report["sizes"][3]  # its keys are longer than its values


def test_a_wrong_gradient_on_one_context_parallel_rank_ends_both(ranks: Ranks) -> None:
    """The other rank has no error, and continues with the next kernel."""
    flags = ranks.flags("dense", "full", "float32", ["--context_parallel_size", "2", "--ddp_timeout", "60"])
    ranks.call("wrong-attention-cp2", "attention_runs:wrong_gradient", 2, flags, rank=1, shapes=2)
    errors = [ranks.report("wrong-attention-cp2", rank)["error"] for rank in range(2)]
    assert any(error.startswith("WrongAttentionKernel: ") for error in errors)
    assert all("WrongAttentionKernel" in error for error in errors), errors


def test_an_output_of_another_size_is_named(ranks: Ranks) -> None:
    flags = ranks.flags("dense", "full", "float32")
    ranks.call("short-attention", "attention_runs:short_output", 1, flags)
    error = ranks.report("short-attention", 0)["error"]
    assert error.startswith("WrongAttentionKernel: ") and ": its output has 127 channels instead of 128." in error


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_wrong_gradient_ends_the_run_on_every_rank(ranks: Ranks, check: str) -> None:
    flags = ranks.flags("dense", "full", "float32", ["--check_attention", check])
    ranks.call(f"wrong-attention-{check}", "attention_runs:wrong_gradient", 2, flags, rank=1)
    first, second = (ranks.report(f"wrong-attention-{check}", rank)["error"] for rank in range(2))
    if check == "false":
        assert first is None and second is None
        return
    assert "checking the attention kernels failed on rank 1: WrongAttentionKernel" in first
    assert second.startswith("WrongAttentionKernel: The attention kernel of --attention_backend flash is wrong on ")
    assert "it misses the gradient of keys by 0.1; 0.03 is allowed." in second and "--check_attention false" in second

"""Seeded completions of a real engine depend on seed and position alone, and follow the distribution asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.forking.client import run_code
from tests.support.runs import megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

EXACT = 2e-5  # of log-probs in fp32, whose sums depend on the batch
DEVIATIONS = 4.5


@pytest.fixture(scope="module")
def report(dense: Path) -> Any:
    code = f"from tests.programs.e2e import position_noise; position_noise.main({str(dense)!r})"
    return json.loads(run_code("trainer", code).rsplit("RESULT ", 1)[1].splitlines()[0])


@pytest.mark.e2e
@pytest.mark.parametrize("batch", ["alone", "reversed", "beside others", "preempted"])
def test_seeded_completions_are_the_same_in_every_batch(report: Any, batch: str) -> None:
    for (expected, logprobs), (found, others) in zip(report["together"], report[batch], strict=True):
        assert found == expected and len(found) == 24
        assert max(abs(a - b) for a, b in zip(logprobs, others, strict=True)) < EXACT
    assert len({tuple(tokens) for tokens, _ in report["together"]}) == len(report["together"])


@pytest.mark.e2e
def test_a_completion_that_was_cut_continues_with_the_same_tokens(report: Any) -> None:
    assert report["continued"] == [tokens for tokens, _ in report["together"]][:4]


@pytest.mark.e2e
def test_only_a_seed_makes_two_completions_the_same(report: Any) -> None:
    (one, _), (other, _) = report["same seeds"]
    assert one == other
    (one, _), (other, _) = report["unseeded"]
    assert one != other


@pytest.mark.e2e
def test_greedy_requests_beside_seeded_ones_are_greedy(report: Any) -> None:
    alone, beside = report["greedy"]
    assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in beside]


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_tokens_follow_the_softmax_after_vllms_filters(report: Any, name: str) -> None:
    from tests.programs.e2e.position_noise import LAW_PROMPT, SETTINGS

    expected = probabilities(report["logits"], LAW_PROMPT, **SETTINGS[name])
    drawn = report["law"][name]
    assert {token for token in drawn if not expected[token]} == set()
    score, freedom = chi_square(drawn, expected)
    assert freedom >= 3
    assert abs(score - freedom) < DEVIATIONS * math.sqrt(2 * freedom), (score, freedom)


@pytest.mark.e2e
@pytest.mark.nightly
def test_tensor_parallel_ranks_sample_what_one_rank_samples(folder: Path, dense: Path, dataset: Path) -> None:
    """The ranks of an engine sample each for itself: in the trainer's processes, and in workers of a server."""
    server = RolloutServer(dense, folder / "sharded server.txt", ["--vllm_tensor_parallel_size", "2"]).start()
    try:
        one = completions(folder / "one", dense, dataset, 1, [])
        sharded = completions(folder / "sharded", dense, dataset, 2, ["--vllm_tensor_parallel_size", "2"])
        url = server.wait().url
        remote = completions(
            folder / "remote", dense, dataset, 1, ["--vllm_mode", "server", "--vllm_server_base_url", url]
        )
    finally:
        server.stop()
    assert one == sharded == remote
    assert len(set(map(tuple, one))) == len(one) >= 8


def completions(folder: Path, model: Path, dataset: Path, ranks: int, flags: list[str]) -> list[list[int]]:
    """Return the tokens of a rollout that a run generates and does not train on."""
    dump = folder / "dump"
    seeded = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--rollout_only", "true",
              "--rollout_dump", str(dump), "--train_iters", "1", "--max_completion_length", "24"]  # fmt: skip
    run = megatron_rlhf(model, dataset, folder, ranks, [*seeded, *flags], {API_KEY_VARIABLE: KEY})
    assert run.code == 0, run.output[-4000:]
    return [row["completion_ids"] for row in read_json_lines(dump / "rollout-000000.jsonl")]


def probabilities(
    logits: list[float],
    prompt: list[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> list[float]:
    """Return the distribution that vLLM documents, in fp64 and one token at a time."""
    punished = [
        (x / repetition_penalty if x > 0 else x * repetition_penalty) if token in prompt else x
        for token, x in enumerate(logits)
    ]
    weights = [math.exp((x - max(punished)) / temperature) for x in punished]
    kept = {token for token, weight in enumerate(weights) if weight >= min_p * max(weights)}
    ranked = sorted(kept, key=lambda token: -weights[token])[: top_k or None]
    whole, before = sum(weights[token] for token in ranked), 0.0
    allowed = []
    for token in ranked:
        if before < top_p:
            allowed.append(token)
        before += weights[token] / whole
    mass = sum(weights[token] for token in allowed)
    return [weights[token] / mass if token in allowed else 0.0 for token in range(len(logits))]


def chi_square(drawn: list[int], expected: list[float]) -> tuple[float, int]:
    """Return chi square and its degrees of freedom; tokens that are expected rarely share a cell."""
    draws = len(drawn)
    cells = [[token] for token, p in enumerate(expected) if p * draws >= 8]
    rare = [token for token, p in enumerate(expected) if 0 < p * draws < 8]
    if sum(expected[token] for token in rare) * draws >= 8:
        cells.append(rare)
    score = 0.0
    for cell in cells:
        mean = draws * sum(expected[token] for token in cell)
        score += (sum(map(drawn.count, cell)) - mean) ** 2 / mean
    return score, len(cells) - 1

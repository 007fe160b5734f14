"""Requests bypass ms-swift's `infer` for speed (generation/vllm/sampling.py): the completions are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.messages import Completion
from swift_megatron_grpo.types import span_problem
from tests.forking.client import run_code


def report_of(kind: str, module: str, model: Path, *arguments: Any) -> Any:
    values = ", ".join(map(repr, (str(model), *arguments)))
    printed = run_code(kind, f"from tests.programs.e2e import {module}; {module}.main({values})")
    return json.loads(printed.rsplit("RESULT ", 1)[1].splitlines()[0])


@pytest.mark.e2e
def test_completions_match_those_of_ms_swifts_engine(dense: Path) -> None:
    plain, stopped = report_of("trainer", "same_answers", dense)
    for result in (plain, stopped):
        assert result["ours"] == result["stock"] == result["unaided"] and len(result["ours"]) == 9
        assert result["versions"] == [3] * 9 and result["together"] > 16
    assert [len(ids) for _, ids, *_ in plain["ours"]] == [24] * 6 + [20] * 3
    assert plain["greedy"] == [ids for _, ids, *_ in plain["ours"]]
    together, alone = plain["seeded"]
    assert together == alone and len(set(map(tuple, together))) == 9
    reasons = [reason for *_, reason, _ in stopped["ours"]]
    assert "stop" in reasons and all(len(ids) < 20 for _, ids, *_ in stopped["ours"][-3:])


@pytest.mark.nightly
@pytest.mark.e2e
def test_completions_of_a_server_match_ms_swifts_and_cost_less(dense: Path) -> None:
    report = report_of("rollout", "server_engine", dense)
    for ours, stock in report["pairs"]:  # greedy, seeded, with a stop word, with min_p
        assert ours == stock
    greedy, likeliest = ([ids for (_, ids, *_), _ in report["pairs"][start : start + 3]] for start in (0, 9))
    assert likeliest == greedy
    assert [len(ids) for (_, ids, *_), _ in report["pairs"]][:6] == [24, 24, 20] * 2
    assert "stop" in {reason for (_, _, _, reason, _), _ in report["pairs"][6:9]}
    assert len({tuple(ids) for _, ids, *_ in report["together"]}) == 8  # each with its own seed
    assert report["encoded"] == 1 and report["kept"] == 0
    assert report["left"] == 0  # in the engine, of 64 that were cancelled
    stock, ours = (min(costs) for costs in zip(*report["costs"], strict=True))
    assert ours < 0.9 * stock, report["costs"]


@pytest.mark.e2e
def test_an_engine_in_a_thread_aborts_runs_commands_and_reports_failure(dense: Path) -> None:
    report = report_of("rollout", "engine_in_thread", dense)
    for ours, stock in report["pairs"]:
        assert ours == stock and len(ours[0]) == len(ours[3]) == 24
    assert report["together"] == [report["pairs"][0][0]] * 8 and report["after"] == report["pairs"][0][0]
    assert report["without"] is None  # log-probs that were not requested
    assert report["left"] == 0  # in the engine, of 64 that were cancelled
    assert report["schedule"] == "FastSchedule"
    assert "no_such_method" in report["unknown"]  # a command that fails leaves the engine as it is
    assert report["failures"] == [f"{report['failed']}: RuntimeError: a kernel failed"] * 2 and report["errored"]


@pytest.mark.e2e
def test_each_span_has_the_log_probs_of_its_weights_on_the_kept_cache(dense: Path) -> None:
    """In fp32, against transformers. The prompt of a request is read with the weights that begin its completion."""
    report = report_of("rollout", "weights_in_flight", dense)
    completions = [Completion.from_json(message) for message in report["completions"]]
    assert max(report["differences"]) < 1e-4 and min(report["planted"]) > 1e-2, report["differences"]
    versions = [[version for version, _ in one.spans or [(one.weights_version, 0)]] for one in completions]
    *completions, long = completions  # its prompt was being read when weights arrived, which waited for its end
    assert len(long.prompt_ids) > 2 * 64 and long.spans == [(4, 1), (5, len(long.completion_ids) - 1)]
    assert [1, 2, 3] in versions[:4] and any(4 in each for each in versions[4:])
    assert all(each[0] >= 3 for each in versions[6:])  # those that came later share no cached block with the first ones
    assert all(span_problem([(one.spans, len(one.completion_ids))], one.weights_version) is None for one in completions)
    assert report["schedule"] == "FastSchedule"
    # weights that do not arrive end what they would have generated, and the engine continues
    assert "no trainer has joined this server" in report["failed"]
    assert report["cancelled"] == ["CancelledError"] * 2 and report["left"] == 0
    assert "new weights have failed to arrive" in report["refused"] and len(report["after"]["completion_ids"]) > 0


@pytest.mark.e2e
def test_weights_that_arrive_in_flight_verify_older_drafts(dense: Path) -> None:
    """Each token is what the noise of its seed and position samples, by transformers and the weights of its span."""
    report = report_of("rollout", "weights_in_flight", dense, 4, 0.1)
    assert max(report["differences"]) < 1e-3 and min(report["planted"]) > 1e-1, report["differences"]
    counts = report["drafts"]
    assert 0 < counts["tokens"] - counts["steps"] < counts["drafted"]
    versions = [[version for version, _ in each["spans"] or []] for each in report["completions"]]
    assert [1, 2, 3] in versions[:4] and versions[-1] == [4, 5]

"""The events of a trace: one process per rank and server, and a line for each of the requests that overlap."""

from __future__ import annotations

import json

from swift_megatron_grpo.generation.interface import AnsweredRequest
from swift_megatron_grpo.loop.trace import RankSpans, Span, events, lanes


def request(server: str, start: float, seconds: float) -> AnsweredRequest:
    return AnsweredRequest(server, start, seconds)


def test_ranks_and_servers_are_processes_on_one_time_line() -> None:
    ranks = [
        RankSpans(0, "a", [Span("train", 100.5, 1.0), Span("step 3", 100.0, 2.0)], [request("http://s", 100.1, 0.2)]),
        RankSpans(1, "b", [Span("step 3", 99.9, 2.0)], []),
    ]
    made = events(ranks)
    assert [event["args"]["name"] for event in made[:3]] == ["rank 0, a", "rank 1, b", "server http://s"]
    spans = {(event["pid"], event["name"]): (event["ts"], event["dur"]) for event in made[3:]}
    assert spans == {
        (0, "train"): (600_000.0, 1e6), (0, "step 3"): (100_000.0, 2e6), (1, "step 3"): (0.0, 2e6),
        (2, "completion"): (200_000.0, 200_000.0),
    }  # fmt: skip
    json.dumps(made, allow_nan=False)


def test_requests_that_overlap_have_their_own_lines() -> None:
    requests = [request("s", 0.0, 2.0), request("s", 1.0, 2.0), request("s", 2.0, 1.0), request("s", 2.5, 1.0)]
    assert [lane for lane, _ in lanes(reversed(requests))] == [0, 1, 0, 2]
    assert lanes([]) == [] and events([]) == []

"""Assignment of requests to servers: every request is finished exactly once, whatever happens to servers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.generation.remote.dispatcher import Assignment, Dispatcher, LostRequests


def test_requests_go_in_order_to_the_server_with_the_largest_free_share() -> None:
    dispatcher = Dispatcher(6)
    assert dispatcher.assign() == []  # no server
    dispatcher.admit("small", 1)
    dispatcher.admit("large", 3)
    assigned = dispatcher.assign()
    assert [assignment.request for assignment in assigned] == [0, 1, 2, 3]
    assert sorted(assignment.server for assignment in assigned) == ["large", "large", "large", "small"]
    assert dispatcher.finish(2, assigned[2].server)
    assert dispatcher.assign() == [Assignment(4, assigned[2].server)]


def test_requests_of_a_lost_server_are_retried_first() -> None:
    """Its late completions are discarded."""
    dispatcher = Dispatcher(5)
    dispatcher.admit("a", 2)
    assert [assignment.request for assignment in dispatcher.assign()] == [0, 1]
    assert dispatcher.finish(0, "a")
    assert dispatcher.mark_lost("a") == {1}
    dispatcher.admit("b", 2)
    assert dispatcher.assign() == [Assignment(1, "b"), Assignment(2, "b")]
    assert not dispatcher.finish(1, "a")
    assert dispatcher.unfinished == 4


def test_a_refused_request_is_retried_after_the_others() -> None:
    dispatcher = Dispatcher(3)
    dispatcher.admit("a", 1)
    assert dispatcher.assign() == [Assignment(0, "a")]
    assert dispatcher.refuse(0, "a") == 1
    for expected in (1, 2, 0):
        assert dispatcher.assign() == [Assignment(expected, "a")]
        if expected:
            assert dispatcher.finish(expected, "a")
    assert dispatcher.refuse(0, "a") == 2


def test_slots_used_by_another_generation_are_not_free() -> None:
    dispatcher = Dispatcher(4)
    dispatcher.admit("a", 2)
    dispatcher.admit("b", 2)
    assert dispatcher.assign({"a": 2, "b": 1}) == [Assignment(0, "b")] and dispatcher.has_waiting
    assigned = dispatcher.assign({"b": 0})
    assert [assignment.server for assignment in assigned] == ["a", "a", "b"] and not dispatcher.has_waiting


def test_a_refused_request_is_retried_on_another_server() -> None:
    dispatcher = Dispatcher(4)
    dispatcher.admit("slow", 4)
    dispatcher.admit("healthy", 1)
    server_of = {assignment.request: assignment.server for assignment in dispatcher.assign()}
    [kept] = [request for request, server in server_of.items() if server == "healthy"]
    refused = next(request for request, server in server_of.items() if server == "slow")
    assert dispatcher.refuse(refused, "slow") == 1
    assert dispatcher.assign() == []  # not to the slow one, although it has a free slot
    assert dispatcher.finish(kept, "healthy")
    assert dispatcher.assign() == [Assignment(refused, "healthy")]
    assert dispatcher.refuse(refused, "healthy") == 2
    assert dispatcher.assign() != []  # both have refused it


def test_a_refused_request_does_not_delay_others() -> None:
    dispatcher = Dispatcher(3)
    dispatcher.admit("slow", 1)
    assert dispatcher.assign() == [Assignment(0, "slow")]
    assert dispatcher.refuse(0, "slow") == 1
    dispatcher.admit("healthy", 1)
    assert {assignment.request for assignment in dispatcher.assign()} == {1, 2}
    assert dispatcher.finish(2, "slow") or dispatcher.finish(2, "healthy")


def test_the_cost_of_each_loss_is_reported_once_it_is_recovered() -> None:
    lost_requests = LostRequests()
    lost_requests.record_loss("a", {1, 2}, now=10)
    lost_requests.record_loss("idle", set(), now=10)
    assert lost_requests.record_completion(3, now=11) == [] and lost_requests.record_completion(1, now=11) == []
    lost_requests.record_loss("b", {2, 4}, now=12)  # where a's second request had been retried
    [of_a] = lost_requests.record_completion(2, now=13)
    assert "lost with a are recovered" in of_a and "2 were regenerated, 3.0 s" in of_a
    [of_b] = lost_requests.record_completion(4, now=15)
    assert "lost with b are recovered" in of_b and "2 were regenerated, 3.0 s" in of_b
    assert lost_requests.record_completion(4, now=16) == []


@settings(max_examples=200)
@given(
    st.integers(1, 30), st.lists(st.tuples(st.sampled_from(["admit", "lose", "finish", "refuse"]), st.integers(0, 9)))
)
def test_every_request_is_finished_exactly_once(requests: int, events: list[tuple[str, int]]) -> None:
    dispatcher = Dispatcher(requests)
    in_flight: dict[int, str] = {}  # server by request, tracked independently
    finished: list[int] = []

    def assign() -> None:
        for assignment in dispatcher.assign():
            assert assignment.request not in in_flight and assignment.request not in finished
            in_flight[assignment.request] = assignment.server

    for event, number in events:
        server = f"s{number % 3}"
        if event == "admit":
            dispatcher.admit(server, 1 + number % 4)
        elif event == "lose":
            lost = dispatcher.mark_lost(server)
            assert lost == {request for request, at in in_flight.items() if at == server}
            for request in lost:
                del in_flight[request]
        elif in_flight:
            request = sorted(in_flight)[number % len(in_flight)]
            if event == "finish":
                assert dispatcher.finish(request, in_flight.pop(request))
                finished.append(request)
            else:
                dispatcher.refuse(request, in_flight.pop(request))
        assign()
    dispatcher.admit("last", 3)
    while dispatcher.unfinished:
        assign()
        request, server = next(iter(in_flight.items()))
        assert dispatcher.finish(request, server)
        finished.append(request)
        del in_flight[request]
    assert sorted(finished) == list(range(requests))

"""Who answers which request: nothing is lost, nothing is answered twice, whatever servers do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.generation.remote.dispatcher import Assignment, Dispatcher
from swift_megatron_grpo.generation.remote.lost_requests import LostRequests


def test_requests_go_in_order_to_the_freest_server() -> None:
    dispatcher = Dispatcher(6)
    assert dispatcher.assign() == []  # nobody is there
    dispatcher.admit("small", 1)
    dispatcher.admit("large", 3)
    assigned = dispatcher.assign()
    assert [each.request for each in assigned] == [0, 1, 2, 3]
    assert sorted(each.server for each in assigned) == ["large", "large", "large", "small"]
    assert dispatcher.finish(2, assigned[2].server)
    assert dispatcher.assign() == [Assignment(4, assigned[2].server)]


def test_what_a_lost_server_was_answering_is_asked_first_and_its_late_answer_is_not_wanted() -> None:
    dispatcher = Dispatcher(5)
    dispatcher.admit("a", 2)
    assert [each.request for each in dispatcher.assign()] == [0, 1]
    assert dispatcher.finish(0, "a")
    assert dispatcher.lose("a") == {1}
    dispatcher.admit("b", 2)
    assert dispatcher.assign() == [Assignment(1, "b"), Assignment(2, "b")]
    assert not dispatcher.finish(1, "a")
    assert dispatcher.unfinished == 4


def test_a_refused_request_is_asked_after_the_others() -> None:
    dispatcher = Dispatcher(3)
    dispatcher.admit("a", 1)
    assert dispatcher.assign() == [Assignment(0, "a")]
    assert dispatcher.refuse(0, "a") == 1
    for expected in (1, 2, 0):
        assert dispatcher.assign() == [Assignment(expected, "a")]
        if expected:
            assert dispatcher.finish(expected, "a")
    assert dispatcher.refuse(0, "a") == 2


def test_slots_that_another_generation_takes_are_not_free() -> None:
    dispatcher = Dispatcher(4)
    dispatcher.admit("a", 2)
    dispatcher.admit("b", 2)
    assert dispatcher.assign({"a": 2, "b": 1}) == [Assignment(0, "b")] and dispatcher.waits
    assert [each.server for each in dispatcher.assign({"b": 0})] == ["a", "a", "b"] and not dispatcher.waits


def test_what_a_server_refused_goes_to_another_one() -> None:
    dispatcher = Dispatcher(4)
    dispatcher.admit("slow", 4)
    dispatcher.admit("well", 1)
    at = {each.request: each.server for each in dispatcher.assign()}
    [kept] = [request for request, server in at.items() if server == "well"]
    refused = next(request for request, server in at.items() if server == "slow")
    assert dispatcher.refuse(refused, "slow") == 1
    assert dispatcher.assign() == []  # rather than of the slow one, which has room
    assert dispatcher.finish(kept, "well")
    assert dispatcher.assign() == [Assignment(refused, "well")]
    assert dispatcher.refuse(refused, "well") == 2
    assert dispatcher.assign() != []  # both have refused it


def test_a_refused_request_does_not_hold_up_others() -> None:
    dispatcher = Dispatcher(3)
    dispatcher.admit("slow", 1)
    assert dispatcher.assign() == [Assignment(0, "slow")]
    assert dispatcher.refuse(0, "slow") == 1
    dispatcher.admit("well", 1)
    assert {each.request for each in dispatcher.assign()} == {1, 2}
    assert dispatcher.finish(2, "slow") or dispatcher.finish(2, "well")


def test_the_cost_of_each_loss_is_told_when_it_is_made_good() -> None:
    recoveries = LostRequests()
    recoveries.lost("a", {1, 2}, now=10)
    recoveries.lost("idle", set(), now=10)
    assert recoveries.finished(3, now=11) == [] and recoveries.finished(1, now=11) == []
    recoveries.lost("b", {2, 4}, now=12)  # the one that a's second request had gone to
    [of_a] = recoveries.finished(2, now=13)
    assert "a had not finished" in of_a and "2 generated anew, 3.0 s" in of_a
    [of_b] = recoveries.finished(4, now=15)
    assert "b had not finished" in of_b and "2 generated anew, 3.0 s" in of_b
    assert recoveries.finished(4, now=16) == []


@settings(max_examples=200)
@given(
    st.integers(1, 30), st.lists(st.tuples(st.sampled_from(["admit", "lose", "finish", "refuse"]), st.integers(0, 9)))
)
def test_whatever_happens_every_request_is_finished_exactly_once(requests: int, events: list[tuple[str, int]]) -> None:
    dispatcher = Dispatcher(requests)
    asked: dict[int, str] = {}  # what an honest observer knows to be in flight
    finished: list[int] = []

    def assign() -> None:
        for each in dispatcher.assign():
            assert each.request not in asked and each.request not in finished
            asked[each.request] = each.server

    for event, number in events:
        server = f"s{number % 3}"
        if event == "admit":
            dispatcher.admit(server, 1 + number % 4)
        elif event == "lose":
            lost = dispatcher.lose(server)
            assert lost == {request for request, at in asked.items() if at == server}
            for request in lost:
                del asked[request]
        elif asked:
            request = sorted(asked)[number % len(asked)]
            if event == "finish":
                assert dispatcher.finish(request, asked.pop(request))
                finished.append(request)
            else:
                dispatcher.refuse(request, asked.pop(request))
        assign()
    dispatcher.admit("last", 3)
    while dispatcher.unfinished:
        assign()
        request, server = next(iter(asked.items()))
        assert dispatcher.finish(request, server)
        finished.append(asked and request)
        del asked[request]
    assert sorted(finished) == list(range(requests))

"""Who answers which request: nothing is lost, nothing is answered twice, whatever servers do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.generation.dispatch import Assignment, Dispatcher


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

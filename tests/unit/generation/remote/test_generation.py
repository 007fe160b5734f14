"""Generations that continue while the trainer does something else, with a real event loop and real web servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from swift_megatron_grpo.generation.interface import requests_for
from swift_megatron_grpo.generation.protocol.messages import SERVER_UNUSABLE
from swift_megatron_grpo.generation.remote.generation import RemoteGeneration
from swift_megatron_grpo.generation.remote.servers import NoServer
from swift_megatron_grpo.settings.servers import RemoteTurnsConfig
from swift_megatron_grpo.types import Prompt
from tests.unit.generation.remote.fake_servers import SAMPLING, Cluster, collect, texts, wait_until


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def in_flight() -> Iterator[Cluster]:
    cluster = Cluster(updates_in_flight=True)
    yield cluster
    cluster.close()


def test_completions_continue_with_newer_weights_and_wait_for_their_check(in_flight: Cluster) -> None:
    [server, _], [fake, _] = in_flight.servers.all, in_flight.fakes
    in_flight.receive_weights(server, 3)
    generation = in_flight.generate("abc", 3)
    wait_until(lambda: len(fake.received) == 3)
    in_flight.update_in_flight(server, 4, verified=False)
    in_flight.release("a")  # of weights 3 alone, so nothing is in doubt
    [first] = collect(generation, 4, 1)
    assert first.text == "a" and first.weights_version == 3 and first.spans is None
    fake.wrong = {"completion_ids": [2, 3], "logprobs": [-1.0, -2.0], "spans": [(3, 1), (4, 1)]}
    in_flight.release("b", "c")
    wait_until(lambda: len(generation._unverified) == 2)
    assert generation.is_running and not generation._groups
    in_flight.update_in_flight(server, 4)
    assert [one.spans for one in collect(generation, 4, 2)] == [[(3, 1), (4, 1)]] * 2
    assert not generation.is_running and fake.received == ["a", "b", "c"] and fake.cancelled == []


@pytest.mark.parametrize("end", ["the check fails", "the server is killed"])
def test_an_update_that_fails_loses_nothing(in_flight: Cluster, end: str) -> None:
    """Neither completions that have ended with weights in doubt, nor those in progress."""
    [server, other], fakes = in_flight.servers.all, in_flight.fakes
    in_flight.receive_weights(server, 3)
    generation = in_flight.generate("abc", 3)
    wait_until(lambda: len(fakes[0].received) == 3)
    in_flight.update_in_flight(server, 4, verified=False)
    fakes[0].wrong = {"weights_version": 4}
    in_flight.release("a")
    wait_until(lambda: len(generation._unverified) == 1)
    if end == "the check fails":
        in_flight.events.run(in_flight.servers.invalidate_unverified(4))
    else:
        in_flight.lose(server)
        in_flight.bring_back(server)
    wait_until(lambda: sorted(fakes[0].cancelled) == ["b", "c"] and not generation._unverified)
    assert generation.next(newest=4).needs_weights and not generation._groups
    fakes[0].wrong = {}
    in_flight.receive_weights(server, 4)
    in_flight.receive_weights(other, 4)
    wait_until(lambda: sum(len(fake.held) for fake in fakes) == 3)
    in_flight.release("a", "b", "c")
    assert texts(collect(generation, 4, 3)) == {"a", "b", "c"}


def test_the_older_generation_is_served_first_and_both_share_the_slots(cluster: Cluster) -> None:
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0, slots=2)  # and one more is queued there
    older = cluster.generate("abcde", 0)
    wait_until(lambda: len(fake.received) == 3)
    newer = cluster.generate("vwx", 0, [older])
    time.sleep(0.1)
    assert fake.received == ["a", "b", "c"]
    cluster.release("a", "b")
    wait_until(lambda: len(fake.received) == 5)
    assert fake.received[3:] == ["d", "e"] and not older.has_waiting
    cluster.release("c", "d")
    wait_until(lambda: len(fake.received) == 7)
    assert fake.received[5:] == ["v", "w"] and older.is_running and newer.is_running
    cluster.release("e", "v", "w")
    wait_until(lambda: len(fake.received) == 8)
    cluster.release("x")
    assert [rollout.text for rollout in collect(newer, 0, 3)] == ["v", "w", "x"]
    assert [rollout.text for rollout in collect(older, 0, 5)] == ["a", "b", "c", "d", "e"]
    assert fake.most_at_once == 3 and not older.is_running and not newer.is_running
    wait_until(lambda: cluster.servers.all[0].requests_in_flight == 0)
    assert cluster.servers.listeners == []


def test_servers_finish_with_old_weights_a_returning_one_waits_for_a_sync(cluster: Cluster) -> None:
    (kept, lost), (fake, other) = cluster.servers.all, cluster.fakes
    for server in (kept, lost):
        cluster.receive_weights(server, 0)
    generation = cluster.generate("abcd", 0)
    wait_until(lambda: len(fake.received) + len(other.received) == 4)
    assert len(other.received) == 2
    cluster.lose(lost)
    wait_until(lambda: len(fake.received) == 4)
    cluster.bring_back(lost)
    assert cluster.servers.without_weights(0) == [lost]
    cluster.release("a", "b", "c", "d")
    assert {rollout.weights_version for rollout in collect(generation, newest=1, number=4)} == {0}


def test_the_trainers_weights_finish_a_generation_that_no_server_can(cluster: Cluster) -> None:
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0)
    generation = cluster.generate("abc", 0)
    wait_until(lambda: len(fake.received) == 3)
    cluster.release("a")
    assert generation.next(newest=1).finished[0].weights_version == 0
    cluster.lose(server)
    cluster.bring_back(server)
    progress = generation.next(newest=1)
    assert progress.needs_weights and not progress.finished and generation.is_running
    cluster.receive_weights(server, 1)  # as the trainer does when needs_weights is True
    wait_until(lambda: len(fake.received) == 5)
    cluster.release("b", "c")
    assert [rollout.weights_version for rollout in collect(generation, newest=1, number=2)] == [1, 1]


def test_a_new_server_gets_the_newest_weights_of_a_generation_at_once(cluster: Cluster) -> None:
    present, new = cluster.servers.all
    cluster.receive_weights(present, 0)
    generation = cluster.generate("ab", 0)
    cluster.bring_back(new)
    assert generation.next(newest=0).needs_weights
    cluster.receive_weights(new, 0)
    wait_until(lambda: sum(len(fake.received) for fake in cluster.fakes) == 2)
    cluster.release("a", "b")
    collect(generation, newest=0, number=2)


@pytest.mark.alone
def test_the_server_timeout_applies_only_while_the_trainer_waits(cluster: Cluster) -> None:
    """A server may be lost for longer than --vllm_server_timeout while the trainer trains."""
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0)
    generation = cluster.generate("a", 0)
    wait_until(lambda: fake.received)
    cluster.lose(server)
    time.sleep(1.5)  # the timeout is 0.5 s
    assert generation.is_running
    cluster.receive_weights(server, 1)
    wait_until(lambda: len(fake.received) == 2)
    cluster.release("a")
    collect(generation, newest=1, number=1)

    generation = cluster.generate("b", 1)
    cluster.lose(server)
    with pytest.raises(NoServer, match="no rollout server has answered"):
        generation.next(newest=1)


@pytest.mark.parametrize("refusal", SERVER_UNUSABLE)
def test_a_server_that_cannot_serve_this_run_is_lost(cluster: Cluster, refusal: int) -> None:
    """It does not count as a failed attempt of the prompt, of which the second would end the run."""
    (failing, healthy), (refusing, fake) = cluster.servers.all, cluster.fakes
    refusing.refusal = refusal
    cluster.receive_weights(failing, 0)
    generation = cluster.generate("abcd", 0)
    wait_until(lambda: failing.is_lost)
    assert str(refusal) in failing.loss_reason and len(refusing.received) == 4 and generation.is_running
    cluster.receive_weights(healthy, 0)
    wait_until(lambda: len(fake.received) == 4)
    cluster.release("a", "b", "c", "d")
    assert [rollout.text for rollout in collect(generation, 0, 4)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"completion_ids": [700]}, "its completion of prompt a is invalid: a token is not in the vocabulary of 7"),
        ({"logprobs": [float("nan")]}, "a log-prob is not finite"),
        ({"completion_ids": [2] * 5, "logprobs": [-1.0] * 5}, "more than --max_completion_length 4"),
        ({"completion_ids": "no base64"}, "its completion cannot be read: InvalidMessage"),
        ({"finish_reason": "abort"}, "its finish_reason is 'abort'"),
    ],
)
def test_a_server_with_an_impossible_completion_is_unused_until_restarted(
    cluster: Cluster, wrong: dict[str, Any], reason: str
) -> None:
    (broken, healthy), (liar, fake) = cluster.servers.all, cluster.fakes
    liar.wrong = wrong
    cluster.servers.config = replace(cluster.servers.config, model={"vocab_size": 7})
    cluster.receive_weights(broken, 0)
    generation = cluster.generate("a", 0)
    wait_until(lambda: liar.received)
    cluster.release("a")
    wait_until(lambda: broken.is_lost)
    assert reason in broken.loss_reason and "not used again before it is restarted" in broken.loss_reason
    cluster.answer_status(broken, "x")  # it still runs, and answers the next status request
    assert broken.is_lost
    cluster.receive_weights(healthy, 0)
    wait_until(lambda: fake.received)
    cluster.release("a")
    assert [rollout.completion_ids for rollout in collect(generation, 0, 1)] == [[2]]
    cluster.answer_status(broken, "restarted")
    assert not broken.is_lost


def test_servers_that_encode_a_prompt_differently_end_the_run(cluster: Cluster) -> None:
    """Either of them may be right."""
    fake, other = cluster.fakes
    other.wrong = {"prompt_ids": [4]}
    for server in cluster.servers.all:
        cluster.receive_weights(server, 0, slots=1)
    generation = cluster.generate("ab", 0, group_size=2)
    wait_until(lambda: fake.received and other.received)
    cluster.release("a", "b")
    with pytest.raises(
        RuntimeError, match=r"http://.* and http://.* encode prompt [ab] differently; start all rollout servers"
    ):
        while True:
            generation.next(newest=0)


def test_a_column_that_cannot_be_sent_ends_the_generation(cluster: Cluster) -> None:
    cluster.servers.config = replace(cluster.servers.config, turns=RemoteTurnsConfig(requested_by=None))
    cluster.receive_weights(cluster.servers.all[0], 0)
    row = {"messages": [{"role": "user", "content": "a"}], "when": date(2026, 1, 2)}
    requests = requests_for([Prompt("0-7", row)], 2, None, 0)
    generation = RemoteGeneration(cluster.events, cluster.servers, requests, 2, SAMPLING, 0)
    cluster.generations.append(generation)
    trainer = ThreadPoolExecutor()
    with pytest.raises(ValueError, match="the column when of prompt 0-7 must"):
        trainer.submit(generation.next, 0).result(timeout=10)
    trainer.shutdown()
    assert not generation.is_running and cluster.fakes[0].received == []


def test_stopping_a_generation_cancels_its_requests(cluster: Cluster) -> None:
    [server, _], [fake, _] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(server, 0)
    generation = cluster.generate("ab", 0)
    wait_until(lambda: len(fake.received) == 2)
    cluster.events.run(generation.stop())
    wait_until(lambda: sorted(fake.cancelled) == ["a", "b"])
    assert not generation.is_running
    with pytest.raises(RuntimeError, match="the run has ended"):
        generation.next(newest=0)


def test_requests_are_sent_in_batches_and_each_is_returned_when_it_ends(cluster: Cluster) -> None:
    first, _ = cluster.servers.all
    cluster.receive_weights(first, 0, slots=4)
    generation = cluster.generate("abcdefg", 0)
    wait_until(lambda: len(cluster.fakes[0].held) == 5)  # its slots, and one that waits there
    assert cluster.fakes[0].batches == [5]
    cluster.release("c")
    assert texts(collect(generation, 0, 1)) == {"c"}  # while the others of its batch are not finished
    wait_until(lambda: "f" in cluster.fakes[0].held)
    assert cluster.fakes[0].batches == [5, 1] and first.requests_in_flight == 5
    cluster.release("a", "b", "d", "e", "f")
    wait_until(lambda: "g" in cluster.fakes[0].held)
    cluster.release("g")
    assert texts(collect(generation, 0, 6)) == set("abdefg")
    wait_until(lambda: first.requests_in_flight == 0)


def test_requests_of_a_refused_batch_are_sent_one_by_one(cluster: Cluster) -> None:
    cluster.fakes[0].refuses_batches = True
    first, _ = cluster.servers.all
    cluster.receive_weights(first, 0)
    generation = cluster.generate("abc", 0)
    wait_until(lambda: set(cluster.fakes[0].held) == set("abc"))
    cluster.release("a", "b", "c")
    assert texts(collect(generation, 0, 3)) == set("abc")
    wait_until(lambda: first.requests_in_flight == 0)
    assert cluster.fakes[0].batches == [1, 1, 1]


def test_a_batch_that_ends_early_loses_the_server_and_is_retried(cluster: Cluster) -> None:
    cluster.fakes[0].ends_early = True
    first, second = cluster.servers.all
    cluster.receive_weights(first, 0)
    generation = cluster.generate("ab", 0)
    wait_until(lambda: first.is_lost)
    assert "ended before 2 of its completions" in first.loss_reason
    wait_until(lambda: first.requests_in_flight == 0)
    cluster.receive_weights(second, 0)
    wait_until(lambda: set(cluster.fakes[1].held) == set("ab"))
    cluster.release("a", "b")
    assert texts(collect(generation, 0, 2)) == {"a", "b"}


def test_a_group_is_one_request_and_is_retried_as_a_whole(cluster: Cluster) -> None:
    """A server of eight slots and one more has four groups of two at a time."""
    [one, other], [lost, fake] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(one, 3)
    generation = cluster.generate("abcde", 3, whole=2)
    wait_until(lambda: len(lost.received) == 4)
    cluster.release("b")
    assert [each.text for each in collect(generation, 3, 2)] == ["b", "b1"]
    cluster.receive_weights(other, 3)
    cluster.lose(one)
    wait_until(lambda: sorted(fake.received) == ["a", "c", "d", "e"])
    cluster.release(*"acde")
    assert sorted(each.text for each in collect(generation, 3, 8)) == sorted(f"{n}{k}" for n in "acde" for k in ("", 1))
    assert not generation.is_running


def test_a_server_that_lacks_a_completion_of_a_group_is_unused(cluster: Cluster) -> None:
    [one, other], [fake, healthy] = cluster.servers.all, cluster.fakes
    cluster.receive_weights(one, 3)
    fake.lacks = 1
    generation = cluster.generate("a", 3, whole=3)
    wait_until(lambda: fake.received == ["a"])
    cluster.release("a")
    wait_until(lambda: one.is_lost)
    assert "it is 2 completions, and 3 were requested" in one.loss_reason
    cluster.receive_weights(other, 3)
    wait_until(lambda: healthy.received == ["a"])
    cluster.release("a")
    assert [each.text for each in collect(generation, 3, 3)] == ["a", "a1", "a2"]

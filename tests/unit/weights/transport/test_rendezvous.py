"""The rendezvous admits processes that have its secret only, whatever others send to its port."""

from __future__ import annotations

import base64
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
from torch.distributed import TCPStore

from swift_megatron_grpo.weights.transport.channel import Channel
from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, authenticate, new_secret, shared_store

HOST = "127.0.0.1"
CPU = torch.device("cpu")


@contextmanager
def opened(size: int, secret: str = "") -> Iterator[Rendezvous]:
    secret = secret or new_secret()
    hub = Hub(HOST, 0, size, secret)
    try:
        yield Rendezvous(HOST, hub.port, size, secret, timeout=20.0)
    finally:
        hub.close()


def form(rendezvous: Rendezvous) -> list[Channel]:
    """Join all ranks and send a message from rank 0 to the others."""
    with ThreadPoolExecutor(rendezvous.size) as ranks:
        joining = [ranks.submit(Channel, rendezvous, rank, CPU) for rank in range(rendezvous.size)]
        channels = [joined.result(timeout=30) for joined in joining]
        receiving = [ranks.submit(channel.receive) for channel in channels[1:]]
        channels[0].send({"text": "hello"})
        assert all(received.result(timeout=30)[0] == {"text": "hello"} for received in receiving)
    return channels


def connect(rendezvous: Rendezvous) -> Connection:
    client = socket.create_connection((rendezvous.host, rendezvous.port), timeout=5)
    client.settimeout(None)
    return Connection(client.detach())


def is_closed(connection: Connection) -> bool:
    """Return True if the hub closes the connection without another message."""
    try:
        return connection.poll(15) and connection.recv_bytes() is None
    except (EOFError, OSError):
        return True


# ---- what strangers try: each gets the rendezvous without its secret, and returns True if it was refused


def guesses_the_secret(rendezvous: Rendezvous) -> bool:
    guess = replace(rendezvous, secret=new_secret(), timeout=1.0)
    with pytest.raises(ConnectionError, match="did not admit"), shared_store(guess):
        pass
    return True


def reflects_the_challenge(rendezvous: Rendezvous) -> bool:
    """Send back what the hub of another connection would send as its proof."""
    with connect(rendezvous) as connection:
        nonce = connection.recv_bytes()
        connection.send_bytes(nonce + authenticate(b"", b"hub", nonce, nonce))
        return is_closed(connection)


def sends_garbage(rendezvous: Rendezvous) -> bool:
    with connect(rendezvous) as connection:
        with suppress(OSError):
            connection.send_bytes(secrets.token_bytes(2**16))
        connection.recv_bytes()
        return is_closed(connection)


def speaks_http(rendezvous: Rendezvous) -> bool:
    with socket.create_connection((rendezvous.host, rendezvous.port), timeout=15) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    return True


def uses_torchs_store(rendezvous: Rendezvous) -> bool:
    with pytest.raises(RuntimeError):
        TCPStore(rendezvous.host, rendezvous.port, timeout=timedelta(seconds=1), wait_for_workers=False).list_keys()
    return True


STRANGERS = [guesses_the_secret, reflects_the_challenge, sends_garbage, speaks_http, uses_torchs_store]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_refused_and_the_group_forms(stranger: Callable[[Rendezvous], bool]) -> None:
    with opened(size=2) as rendezvous:
        assert stranger(replace(rendezvous, secret=""))
        for channel in form(rendezvous):
            channel.close()


def test_strangers_lose_every_race_for_a_place_in_the_group() -> None:
    """Eight strangers try to join as the worker, from before the first rank connects until the group has formed."""
    for _ in range(5):
        with opened(size=2) as rendezvous, ThreadPoolExecutor(8) as pool:
            over = threading.Event()
            attempts = [pool.submit(attempts_to_join, rendezvous, over) for _ in range(8)]
            channels = form(rendezvous)
            over.set()
            assert sum(attempt.result(timeout=30) for attempt in attempts) > 0
            for channel in channels:
                channel.close()


def attempts_to_join(rendezvous: Rendezvous, over: threading.Event) -> int:
    """Guess the secret until the race is over; return how often that was refused."""
    refused = 0
    while not over.is_set():
        with pytest.raises(ConnectionError):
            Channel(replace(rendezvous, secret=new_secret(), timeout=0.3), 1, CPU)
        refused += 1
    return refused


def is_waiting(connection: Connection) -> bool:
    """Return True if the hub has challenged the connection and waits for its proof."""
    try:
        return len(connection.recv_bytes()) == 32 and not connection.poll(0)
    except (EOFError, OSError):
        return False


def test_silent_connections_do_not_keep_the_ranks_out() -> None:
    """A stranger opens 200 connections and sends nothing: the newest are kept, for 10 s, and the ranks admitted."""
    with opened(size=2) as rendezvous:
        silent = [connect(rendezvous) for _ in range(200)]
        assert [is_waiting(end) for end in reversed(silent)] == [True] * 64 + [False] * 136
        for end in (*form(rendezvous), *silent):
            end.close()


def test_strangers_who_keep_connecting_do_not_keep_the_ranks_out() -> None:
    with opened(size=2) as rendezvous, ThreadPoolExecutor(2) as pool:
        over = threading.Event()
        floods = [pool.submit(keeps_connecting, rendezvous, over) for _ in range(2)]
        try:
            channels = form(rendezvous)
        finally:
            over.set()
        assert all(flood.result(timeout=30) for flood in floods)
        for channel in channels:
            channel.close()


def keeps_connecting(rendezvous: Rendezvous, over: threading.Event) -> int:
    """Hold 100 silent connections, and open another as soon as possible; return how many were opened."""
    held: list[Connection] = []
    opened = 0
    while not over.is_set():
        with suppress(ConnectionError):
            held.append(connect(rendezvous))
            opened += 1
        if len(held) > 100:
            held.pop(0).close()
    for connection in held:
        connection.close()
    return opened


def test_a_rank_whose_connection_is_closed_for_a_newer_one_tries_again() -> None:
    with opened(size=2) as rendezvous, socket.create_server((HOST, 0)) as listener:

        def close_the_first() -> None:
            listener.accept()[0].close()
            relay(listener, rendezvous.port, [])

        threading.Thread(target=close_the_first, daemon=True).start()
        channels = form(replace(rendezvous, port=listener.getsockname()[1]))
        assert len(channels) == 2
        for channel in channels:
            channel.close()


def test_a_hub_that_has_ended_is_noticed_at_once() -> None:
    with opened(size=2) as rendezvous:
        pass
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        Channel(rendezvous, 1, CPU)
    assert time.monotonic() - began < 5


def test_a_trainer_that_never_connects_frees_the_workers_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timeout is for transfers, and may be a day."""
    monkeypatch.setattr("swift_megatron_grpo.weights.transport.rendezvous._FORM_SECONDS", 1.0)
    began = time.monotonic()
    with opened(size=2) as rendezvous, pytest.raises(RuntimeError):
        Channel(replace(rendezvous, timeout=86400.0), 1, CPU)
    assert time.monotonic() - began < 10


def test_a_transfer_has_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_megatron_grpo.weights.transport.rendezvous._FORM_SECONDS", 1.0)
    with opened(size=2) as rendezvous, ThreadPoolExecutor(2) as ranks:
        trainer, worker = ranks.map(lambda rank: Channel(rendezvous, rank, CPU), range(2))
        received = ranks.submit(worker.receive)
        time.sleep(2.5)
        trainer.send({"text": "hello"})
        assert received.result(timeout=30)[0] == {"text": "hello"}
        trainer.close()
        worker.close()


def test_a_recorded_proof_is_worth_nothing_later() -> None:
    """The stranger is in the middle of one rank's connection, and repeats its messages on a connection of its own."""
    with opened(size=2) as rendezvous, socket.create_server((HOST, 0)) as listener:
        middle = replace(rendezvous, port=listener.getsockname()[1], timeout=2.0)
        with ThreadPoolExecutor(1) as rank:
            joining = rank.submit(lambda: shared_store(middle).__enter__())
            victim = Connection(listener.accept()[0].detach())
            with connect(rendezvous) as relayed:
                victim.send_bytes(relayed.recv_bytes())
                recorded = victim.recv_bytes()
            with connect(rendezvous) as connection:
                connection.recv_bytes()  # another challenge
                connection.send_bytes(recorded)
                assert is_closed(connection)
            victim.close()
            with pytest.raises(ConnectionError):
                joining.result(timeout=30)


def relay(listener: socket.socket, port: int, sent: list[bytes]) -> None:
    """Connect each client of a listener to the port, and keep every byte of both directions."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                sent.append(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            hub = socket.create_connection((HOST, port))
            for ends in ((client, hub), (hub, client)):
                threading.Thread(target=copy, args=ends, daemon=True).start()


def test_the_secret_is_never_sent() -> None:
    secret, sent = new_secret(), list[bytes]()
    with opened(2, secret) as rendezvous, socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=relay, args=(listener, rendezvous.port, sent), daemon=True).start()
        for channel in form(replace(rendezvous, port=listener.getsockname()[1])):
            channel.close()
    wire = b"".join(sent)
    assert len(wire) > 500  # proofs and the addresses of both ranks
    for form_of_secret in (secret.encode(), bytes.fromhex(secret), base64.b64encode(bytes.fromhex(secret))):
        assert form_of_secret not in wire


def test_a_false_hub_is_recognised() -> None:
    with opened(size=2, secret="the secret of a stranger") as rendezvous:
        impostor = replace(rendezvous, secret=new_secret(), timeout=1.0)
        with pytest.raises(ConnectionError), shared_store(impostor):
            pass
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as rank:

        def answer() -> None:
            with Connection(listener.accept()[0].detach()) as connection:
                connection.send_bytes(secrets.token_bytes(32))
                connection.recv_bytes()
                connection.send_bytes(secrets.token_bytes(32))
                is_closed(connection)

        rank.submit(answer)
        rendezvous = Rendezvous(HOST, listener.getsockname()[1], 2, new_secret(), 20.0)
        with pytest.raises(ConnectionError, match="does not have the secret"), shared_store(rendezvous):
            pass


class _Intruder(Channel):
    """A rank that got into the group past the rendezvous, through a connection of gloo."""

    def _check_members(self, secret: bytes) -> None:
        super()._check_members(b"a guess")


def test_a_rank_that_got_past_the_rendezvous_is_recognised_over_the_group() -> None:
    with opened(size=2) as rendezvous, ThreadPoolExecutor(2) as ranks:
        trainer = ranks.submit(Channel, rendezvous, 0, CPU)
        intruder = ranks.submit(_Intruder, rendezvous, 1, CPU)
        with pytest.raises(ConnectionError, match="rank 1 of the weight group does not have the secret"):
            trainer.result(timeout=30)
        with pytest.raises((ConnectionError, RuntimeError)):
            intruder.result(timeout=30)


def test_the_port_is_closed_once_the_group_has_formed() -> None:
    with opened(size=3) as rendezvous:
        connect(rendezvous).close()  # open before
        channels = form(rendezvous)
        end = time.monotonic() + 5
        with pytest.raises(ConnectionRefusedError):
            while time.monotonic() < end:
                connect(rendezvous).close()
                time.sleep(0.05)
        for channel in channels:
            channel.close()


def test_the_secret_is_not_in_the_representation() -> None:
    secret = new_secret()
    assert secret not in repr(Rendezvous(HOST, 1, 2, secret, 1.0))

"""The rendezvous of a process group between trainer and server, which admits only processes that have its secret.

torch's TCPStore authenticates nobody: whoever reaches its port can list its keys and write them. Here each rank has a
HashStore in its own memory. A hub in the server's web process copies the keys that one rank writes to the other ranks,
over connections on which both ends have proved by an HMAC that they have the secret. The secret itself is never sent.
"""

from __future__ import annotations

import base64
import errno
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import HashStore, Store

_FORM_SECONDS = 30.0  # for all ranks to find each other; the hub is listening before they learn of it
_PROOF_SECONDS = 10.0  # for a client to prove that it has the secret, which takes milliseconds
_UNPROVED = 64  # connections that have not proved it yet; another one closes the oldest
_NONCE_BYTES = 32
_MAC_BYTES = 32
_LARGEST_FRAME = 2**20
_POLL_SECONDS = 0.005  # between two looks at the keys of the local store


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address, secret and settings with which the ranks of a group find each other."""

    host: str
    port: int
    size: int
    secret: str = field(repr=False)
    timeout: float  # seconds, for every transfer

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Rendezvous:
        """Return the rendezvous in a server's response, whose values may be of any type."""
        host, secret = str(message["host"]), str(message["secret"])
        return cls(host, int(message["port"]), int(message["size"]), secret, float(message["timeout"]))

    @property
    def seconds_to_form(self) -> float:
        """Return how long ranks wait for each other: a rank that has gone would block the others for `timeout`."""
        return min(self.timeout, _FORM_SECONDS)


def new_secret() -> str:
    return secrets.token_hex(32)


class Hub:
    """The server's end: copies keys among the ranks of one group, and stops listening once all of them have left."""

    def __init__(self, host: str, port: int, size: int, secret: str) -> None:
        """Listen on this address only. Port 0: any free port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()  # every interface, of either family
        self._listener = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
        self.port: int = self._listener.getsockname()[1]
        self._size = size
        self._secret = secret.encode()
        self._lock = threading.Lock()
        self._admitted: list[Connection] = []
        self._joined = 0  # ranks admitted so far
        self._frames: list[bytes] = []  # all keys so far, for ranks that come later
        self._unproved: deque[Connection] = deque()  # oldest first
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stop listening and disconnect all ranks; a group that has formed is not affected."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for connection in (*self._admitted, *self._unproved):
                _disconnect(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(0.1)
                    continue
                return  # closed
            connection = Connection(client.detach())
            with self._lock:
                if len(self._unproved) == _UNPROVED:  # strangers who send nothing must not keep the ranks out
                    _disconnect(self._unproved.popleft())
                self._unproved.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="rendezvous client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            try:
                _limit_waiting(connection, _PROOF_SECONDS)
                proved = self._has_secret(connection)
            finally:
                self._forget_unproved(connection)
            if proved and self._admit(connection):
                try:
                    while True:
                        self._copy(connection.recv_bytes(_LARGEST_FRAME), connection)
                finally:
                    with self._lock:
                        self._admitted.remove(connection)
                        is_over = self._joined == self._size and not self._admitted
                    if is_over:
                        self.close()

    def _has_secret(self, connection: Connection) -> bool:
        """Challenge the client, and prove in return that this end has the secret."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send_bytes(nonce)
        response = connection.recv_bytes(_NONCE_BYTES + _MAC_BYTES)
        client_nonce = response[:_NONCE_BYTES]
        if not hmac.compare_digest(response[_NONCE_BYTES:], authenticate(self._secret, b"client", nonce, client_nonce)):
            return False
        if not self._forget_unproved(connection):
            return False  # closed for a newer connection; the client tries again
        connection.send_bytes(authenticate(self._secret, b"hub", client_nonce, nonce))
        return True

    def _forget_unproved(self, connection: Connection) -> bool:
        """Stop counting a connection as unproved. Return False if it does not count any more."""
        with self._lock:
            try:
                self._unproved.remove(connection)
            except ValueError:
                return False
        return True

    def _admit(self, connection: Connection) -> bool:
        _limit_waiting(connection, 0)
        with self._lock:
            if self._joined == self._size:
                return False
            self._joined += 1
            for frame in self._frames:
                connection.send_bytes(frame)
            self._admitted.append(connection)
        return True

    def _copy(self, frame: bytes, sender: Connection) -> None:
        with self._lock:
            self._frames.append(frame)
            for connection in self._admitted:
                if connection is not sender:
                    with suppress(OSError):  # its own thread notices that it is gone
                        connection.send_bytes(frame)


@contextmanager
def shared_store(rendezvous: Rendezvous) -> Iterator[tuple[Store, str]]:
    """Connect to the hub. Inside the block, keys of the returned store are shared with the other ranks.

    Also returns the local address of the connection, at which the other machine can reach this one. Leave the block
    once the group has communicated: the store then remains as it is.
    """
    store = HashStore()
    store.set_timeout(timedelta(seconds=rendezvous.seconds_to_form))
    connection, address = _connect(rendezvous)
    finished = threading.Event()
    with connection:
        copying = threading.Thread(target=_share, args=(store, connection, finished), name="rendezvous", daemon=True)
        copying.start()
        try:
            yield store, address
        finally:
            finished.set()
            copying.join()


def authenticate(secret: bytes, *message: bytes) -> bytes:
    """Return the HMAC of a message, whose parts have fixed lengths or are constants."""
    return hmac.digest(secret, b"|".join(message), "sha256")


def _connect(rendezvous: Rendezvous) -> tuple[Connection, str]:
    """Connect to the hub, and return the connection with its local address once both ends have proved the secret.

    Try again if the hub closes the connection, as it does if strangers open too many.
    """
    end = time.monotonic() + rendezvous.seconds_to_form
    while True:
        left = max(end - time.monotonic(), 0.1)
        try:
            client = socket.create_connection((rendezvous.host, rendezvous.port), timeout=left)
            client.settimeout(None)
            address: str = client.getsockname()[0]
            connection = Connection(client.detach())
            try:
                _prove(connection, rendezvous.secret.encode(), left)
            except BaseException:
                connection.close()
                raise
            return connection, address
        except _NotAdmitted:
            if time.monotonic() > end - 0.2:
                raise
            time.sleep(0.1)


class _NotAdmitted(ConnectionError):
    """The hub has closed the connection."""


def _prove(connection: Connection, secret: bytes, seconds: float) -> None:
    """Prove to the hub that this end has the secret, and check the hub's proof."""
    _limit_waiting(connection, seconds)
    try:
        nonce = connection.recv_bytes(_NONCE_BYTES)
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send_bytes(own_nonce + authenticate(secret, b"client", nonce, own_nonce))
        mac = connection.recv_bytes(_MAC_BYTES)
    except (EOFError, OSError) as error:
        raise _NotAdmitted("the rendezvous for weights did not admit this process") from error
    if not hmac.compare_digest(mac, authenticate(secret, b"hub", own_nonce, nonce)):
        raise ConnectionError("the rendezvous for weights is held by a process that does not have the secret")
    _limit_waiting(connection, 0)


def _share(store: Store, connection: Connection, finished: threading.Event) -> None:
    """Copy keys between the local store and the hub."""
    known: set[str] = set()
    with suppress(EOFError, OSError):
        while not finished.is_set():
            if connection.poll(_POLL_SECONDS):
                frame = json.loads(connection.recv_bytes(_LARGEST_FRAME))
                known.add(frame["key"])
                store.set(frame["key"], base64.b64decode(frame["value"]))  # type: ignore[arg-type]  # bytes, in fact
            for key in set(store.list_keys()) - known:
                known.add(key)
                value = base64.b64encode(store.get(key)).decode()
                connection.send_bytes(json.dumps({"key": key, "value": value}).encode())


def _limit_waiting(connection: Connection, seconds: float) -> None:
    """Limit how long a read or a write on the connection may take; 0: no limit."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=socket.dup(connection.fileno())) as duplicate:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            duplicate.setsockopt(socket.SOL_SOCKET, option, limit)


def _disconnect(connection: Connection) -> None:
    """End pending reads of the connection, in whatever thread; that thread closes it."""
    with suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)

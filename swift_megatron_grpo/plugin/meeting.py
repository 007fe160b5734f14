"""The rendezvous of torchruns on several machines: names those that have not begun, also when it is given up.

A torchrun that waits writes its number into the store of the rendezvous, and looks for those of the others.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swift_megatron_grpo.runtime.machines import Store, connected

_QUIET_SECONDS = 30.0  # until a line says which machines have not begun
_ASK_SECONDS = 2.0
_NAMED = 8  # machines


class NeverBegun(Exception):
    """Machines have not begun in time. The message names them."""


@contextmanager
def naming_absent_machines(handler: Any, say: Callable[[str], None]) -> Iterator[None]:
    """Surround torch's rendezvous; raise NeverBegun if it fails because machines have not begun.

    `handler`: torch's. That of --rdzv_backend c10d numbers machines once all have begun, and is left to torch.
    """
    if handler.get_backend() != "static" or handler.world_size == 1:
        yield
        return
    meeting = _Meeting(handler)
    thread = threading.Thread(target=meeting.wait, args=[say], name="meeting", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:  # of torch's store
        if meeting.absent:
            raise NeverBegun(meeting.why_ended()) from error
        raise
    finally:
        meeting.over.set()
        thread.join(_ASK_SECONDS)  # ranks are forked next


class _Meeting:
    """The machines of a rendezvous, as this one sees them."""

    def __init__(self, handler: Any) -> None:
        self._number, self._count = handler.rank, handler.world_size
        self._address, self._port = handler.master_addr, handler.master_port
        self._seconds = handler.timeout.total_seconds()
        self._others = {other for other in range(self._count) if other != self._number}
        self._store: Store | None = None
        self.absent: set[int] = set()  # empty before this machine has looked
        self.over = threading.Event()

    def wait(self, say: Callable[[str], None]) -> None:
        """Look until it is over; name once the machines that have not begun after a while."""
        names_at = time.monotonic() + min(_QUIET_SECONDS, self._seconds / 2)
        while not self.over.wait(_ASK_SECONDS):
            self._look()
            if self.absent and time.monotonic() > names_at:
                place = f"{self._address}:{self._port}"
                say(f"machine {self._number} waits for {self._named()} to begin, at {place}. {self._advice()}")
                names_at = float("inf")

    def _look(self) -> None:
        try:
            if self._store is None:
                self._store = connected(self._address, self._port)
                self._store.set(_key(self._number), "")
            self.absent = {other for other in self.absent or self._others if not self._store.check([_key(other)])}
        except (OSError, RuntimeError):  # the store does not answer: machine 0 has it
            if self._store is None:
                self.absent = {0} if self._number else self._others

    def why_ended(self) -> str:
        has = "has" if len(self.absent) == 1 else "have"
        return (
            f"{self._named()} {has} not begun within {self._seconds:g} s, so machine {self._number} ends. "
            f"{self._advice()}. PET_RDZV_CONF=timeout={2 * self._seconds:g} on all of them waits longer"
        )

    def _named(self) -> str:
        numbers = sorted(self.absent)
        more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
        return f"machine{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_NAMED]))}{more}"

    def _advice(self) -> str:
        return (
            f"Start the same command on all {self._count} machines, each with the same NNODES, MASTER_ADDR and "
            f"MASTER_PORT, and a NODE_RANK of its own below {self._count}; machine 0 has this address"
        )


def _key(number: int) -> str:
    return f"begun/{number}"

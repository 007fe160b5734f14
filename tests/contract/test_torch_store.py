"""Facts of torch's stores that docs/security.md, weights/transport, runtime and gateways.py rely on."""

from __future__ import annotations

import pickle
import subprocess
import time
from datetime import UTC, datetime, timedelta
from threading import Thread

from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousState,
)


def test_torchruns_store_listens_on_every_interface_without_a_key() -> None:
    """docs/security.md warns of it. If this fails, torch has changed: restrict the address, and correct the page."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("a", "1")
    listening = subprocess.check_output(["ss", "-ltnH", f"sport = :{store.port}"], text=True)
    assert listening.split()[3] == f"*:{store.port}"
    stranger = TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=5), wait_for_workers=False)
    assert "a" in " ".join(stranger.list_keys())


def test_a_store_in_memory_holds_bytes_and_lists_its_keys() -> None:
    store = HashStore()
    store.set("a", b"\x00\xff")  # type: ignore[arg-type]  # bytes are accepted
    assert store.list_keys() == ["a"] and store.get("a") == b"\x00\xff"


def test_torchruns_keep_alives_compare_the_clocks_of_machines() -> None:
    """A machine whose clock is an hour behind is taken for dead, although it lives."""
    store = HashStore()
    backend = C10dRendezvousBackend(store, "run")  # type: ignore[arg-type]  # any store
    handler = DynamicRendezvousHandler.from_backend("run", store, backend, 2, 2, timeout=RendezvousTimeout())
    (other,) = [DynamicRendezvousHandler.from_backend("run", store, backend, 2, 2)._this_node]
    state = _RendezvousState()
    state.complete, state.participants = True, {other: 0}
    state.last_heartbeats = {other: datetime.now(UTC) - timedelta(hours=1)}  # it has just written this
    backend.set_state(pickle.dumps(state))
    handler._state_holder.sync()
    assert other not in handler._state_holder.state.participants


def test_a_clone_of_a_store_is_free_while_the_original_waits() -> None:
    """A gateway is told by it to end a transfer, while its main thread may wait for a key of another rank."""
    store = PrefixStore("run", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    clone = store.clone()  # type: ignore[attr-defined]
    waiting = Thread(target=store.wait, args=(["later"], timedelta(seconds=60)), daemon=True)
    waiting.start()
    time.sleep(0.2)
    clone.set("later", "1")
    waiting.join(10)
    assert not waiting.is_alive() and clone.check(["later"])

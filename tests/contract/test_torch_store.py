"""Facts of torch's key-value stores that docs/security.md and weights/transport/rendezvous.py rely on."""

from __future__ import annotations

import subprocess
from datetime import timedelta

from torch.distributed import HashStore, TCPStore


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

"""Limits on the connections of the web server, which uvicorn leaves to a proxy in front of it.

uvicorn waits forever for the first request of a connection and for the end of its headers, and accepts headers of any
size. Each connection costs a file descriptor, and without a free one the server accepts no connection.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HEADER_BYTES = 2**16
_Base: Any = AutoHTTPProtocol  # uvicorn's protocol: which one depends on the installed packages


def bounded_protocol(most: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which closes idle connections and those beyond a number."""

    class BoundedProtocol(_Base):
        _received = 0  # bytes since the last request began

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
            else:
                self._close_later(None)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._received = self._received + len(data) if self._is_idle else 0
            if self._received > _HEADER_BYTES:
                self.transport.abort()

        @property
        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _close_later(self, last_request: object) -> None:
            self.loop.call_later(idle_seconds, self._close_if_idle, last_request)

        def _close_if_idle(self, last_request: object) -> None:
            """Close the connection unless a request has begun since `last_request` or is in progress."""
            if self.transport.is_closing():
                return
            if self._is_idle and self.cycle is last_request:
                self.transport.abort()
            else:
                self._close_later(self.cycle)

    return BoundedProtocol


def allow_open_files(number: int) -> None:
    """Raise this process's limit on open files as far as it may; each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""The health of the engine, measured by the tokens that it generates.

A core that has lost a thread, or a tokenizer that waits forever, raises no error and answers every other request. While
nothing is generated, this server therefore generates one token from time to time, by the same path as a request. If
neither that token nor any other appears within --health_timeout, the engine is stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

_CHECKS = 8  # in one timeout
_LONGEST_PAUSE = 30.0  # seconds between two checks


class EngineHealth:
    """Observes an engine until it is stuck.

    `probe` returns once the engine has generated a token, its own or another request's.
    """

    def __init__(self, probe: Callable[[], Awaitable[object]], timeout: float) -> None:
        self._probe, self._timeout = probe, timeout
        self._suspensions = 0
        self._generated = False
        self._last_failure = ""

    def record_token(self) -> None:
        """Record that the engine has completed a request."""
        self._generated = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Expect no tokens inside the context: the engine receives weights."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1
            self._generated = True  # the time begins now

    async def wait_until_stuck(self) -> str:
        """Return the reason once the engine has generated nothing for the whole timeout.

        Time is counted in checks of this loop, so that a process that was stopped, or a machine that was suspended,
        does not count as a stuck engine.
        """
        pause = min(self._timeout / _CHECKS, _LONGEST_PAUSE)
        silent = 0.0
        probing: asyncio.Task[None] | None = None
        try:
            while silent + pause < self._timeout:
                await asyncio.sleep(pause)
                if self._generated or self._suspensions:
                    silent, self._generated = 0.0, False
                    continue
                silent += pause
                if probing is None or probing.done():
                    probing = asyncio.create_task(self._generate())
        finally:
            if probing is not None:
                probing.cancel()
        return f"the engine has generated no token for {silent:.0f} s (--health_timeout){self._last_failure}"

    async def _generate(self) -> None:
        try:
            await self._probe()
        except Exception as error:
            self._last_failure = f"; the last attempt failed: {error}"
        else:
            self._last_failure = ""
            self._generated = True

"""The health of the engine, measured by the tokens that it generates.

A core that has lost a thread, or a tokenizer that waits forever, raises no error and still serves all other requests.
While nothing is generated, this server therefore generates one token from time to time, by the same path as a request.
If neither that token nor any other appears within --health_timeout, the engine is stuck.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

Complete = Callable[[dict[str, Any], dict[str, Any]], Coroutine[Any, Any, object]]  # from request and sampling
_CHECKS = 8  # in one timeout
_LONGEST_PAUSE = 30.0  # seconds between two checks
_PROBE = {"messages": [{"role": "user", "content": "?"}]}
_SAMPLING = {"max_tokens": 1, "temperature": 0.0}  # greedy: it does not advance the random numbers of completions
_GRACE = 1.0  # seconds for the probe to end after a token was generated


class EngineHealth:
    """Observes an engine until it is stuck. `probe` returns once it has generated a token, of whatever request."""

    def __init__(self, probe: Callable[[], Awaitable[object]], timeout: float) -> None:
        self._probe, self._timeout = probe, timeout
        self.failure: str | None = None  # why the engine has ended
        self._suspensions = 0
        self._generated = False
        self._last_failure = ""

    def record_token(self) -> None:
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


class Prober:
    """Probes the engine, in its process: generates one token, unless others are generated anyway."""

    def __init__(self, complete: Complete, engine: Any) -> None:
        self._complete = complete
        self._token = asyncio.Event()
        loop = asyncio.get_running_loop()
        processor = engine.output_processor
        process_outputs = processor.process_outputs

        def process(outputs: Any, *arguments: Any, **options: Any) -> Any:
            """Process what the engine's core has generated in one step; EngineThread calls this in its thread."""
            if outputs and not self._token.is_set():
                loop.call_soon_threadsafe(self._token.set)
            return process_outputs(outputs, *arguments, **options)

        processor.process_outputs = process

    async def wait_for_token(self) -> None:
        """Return once the engine has generated a token for a probe, which may queue for minutes, or another request."""
        self._token.clear()
        generating = asyncio.ensure_future(self._complete(_PROBE, _SAMPLING))
        waiting = asyncio.ensure_future(self._token.wait())
        try:
            await asyncio.wait([generating, waiting], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([generating], timeout=_GRACE)
            if generating.done():
                generating.result()
        finally:
            generating.cancel()
            waiting.cancel()

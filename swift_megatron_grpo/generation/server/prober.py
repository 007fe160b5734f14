"""The probe of health.py in the engine's process: generates one token, unless others are generated anyway."""

from __future__ import annotations

import asyncio
from typing import Any

from swift_megatron_grpo.generation.server.completions import Completer

_REQUEST = {"messages": [{"role": "user", "content": "?"}]}
_SAMPLING = {"max_tokens": 1, "temperature": 0.0}  # greedy: it does not advance the random numbers of completions

_GRACE = 1.0  # seconds for the own request to end after a token was generated


class Prober:
    """Waits for a token of any request, and sends a request for one."""

    def __init__(self, completer: Completer, engine: Any) -> None:
        self._completer = completer
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
        """Send a request, and return once the engine has generated a token for it or for another request.

        Behind a long queue the own request may have to wait for minutes.
        """
        self._token.clear()
        generating = asyncio.ensure_future(self._completer.complete(_REQUEST, _SAMPLING))
        waiting = asyncio.ensure_future(self._token.wait())
        try:
            await asyncio.wait([generating, waiting], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([generating], timeout=_GRACE)
            if generating.done():
                generating.result()
        finally:
            generating.cancel()
            waiting.cancel()

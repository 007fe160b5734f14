"""ms-swift's own routes, one after the other and outside the event loop.

They share one pipe, and wait in the web server's event loop until the engine has answered: two at a time would read
each other's answers, and while one waits, the server would neither answer other clients nor detect a stuck engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

from fastapi import HTTPException

from swift_megatron_grpo.generation.protocol.messages import INVALID

Handler = Callable[..., Coroutine[Any, Any, Any]]
# handlers of SwiftRolloutDeploy that use the pipe
STOCK_METHODS = (
    "get_model_state_keys", "init_communicator", "update_named_param", "update_adapter_flattened_param",
    "update_adapter_param", "update_flattened_params", "process_weights_after_loading", "reset_prefix_cache",
    "reset_encoder_cache", "reset_mm_cache", "close_communicator", "infer",
)  # fmt: skip


def one_at_a_time(server: Any, methods: Sequence[str]) -> None:
    """Replace these handlers of a server, before it registers them as routes."""
    turn = asyncio.Lock()
    for name in methods:
        setattr(server, name, _in_turn(getattr(server, name), turn))


def _in_turn(handler: Handler, turn: asyncio.Lock) -> Handler:
    @wraps(handler)
    async def handle(*arguments: Any, **options: Any) -> Any:
        async with turn:
            try:
                return await asyncio.to_thread(asyncio.run, handler(*arguments, **options))
            except TypeError as error:  # ms-swift's engine has logged an error, and answered None instead of a list
                raise HTTPException(
                    INVALID, "the engine refused the request; the server's log has the reason"
                ) from error

    return handle

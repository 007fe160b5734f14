"""An external plugin of `swift rollout`: completions of a request take at least SECONDS, however small the model is."""

from __future__ import annotations

import asyncio
import os
from functools import wraps
from typing import Any

from swift_megatron_grpo.generation.server.routes import RolloutRoutes

generate = RolloutRoutes.generate_batch


@wraps(generate)
async def generate_slowly(*args: Any, **kwargs: Any) -> Any:
    response, _ = await asyncio.gather(generate(*args, **kwargs), asyncio.sleep(float(os.environ["SECONDS"])))
    return response


RolloutRoutes.generate_batch = generate_slowly  # type: ignore[method-assign]

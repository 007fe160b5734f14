"""An external plugin of `swift rollout`: a completion takes at least SECONDS, however small the model is."""

from __future__ import annotations

import asyncio
import os
from functools import wraps
from typing import Any

from swift_megatron_grpo.generation.server.routes import RolloutRoutes

generate = RolloutRoutes.generate


@wraps(generate)
async def generate_slowly(*args: Any, **kwargs: Any) -> Any:
    response, _ = await asyncio.gather(generate(*args, **kwargs), asyncio.sleep(float(os.environ["SECONDS"])))
    return response


RolloutRoutes.generate = generate_slowly  # type: ignore[method-assign]

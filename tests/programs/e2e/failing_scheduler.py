"""An external plugin: a scheduler whose tool ends its process, in a task of its own."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Failing(MultiTurnScheduler):
    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        await asyncio.gather(self._call_tool())

    async def _call_tool(self) -> None:
        await asyncio.sleep(0)
        sys.exit("the tool is not there")


multi_turns["failing"] = Failing

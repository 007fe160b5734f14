"""An external plugin: of every two conversations, one waits in its tool until all others of its engine have ended.

They would wait forever if a conversation could not continue before the tools of all others answer. The environment
`waiting` waits as asyncio does, `blocking` blocks its thread, `hanging` waits for nothing. Every event is appended to
the file EVENTS. QUICK is the number of the others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

from swift.rollout.gym_env import Env, envs

TURNS = 3
left = int(os.environ["QUICK"])
lock, all_ended = threading.Lock(), threading.Event()


def note(event: str) -> None:
    with Path(f"{os.environ['EVENTS']}.{os.environ['RANK']}").open("a") as file:
        file.write(event + "\n")


class Waiting(Env):
    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self.name = config.uuid
        self.waits = int(self.name.rpartition("-")[2]) % 2 == 0
        self.turns = 0
        return "Begin.", {}, ""

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        self.turns += 1
        if self.waits and self.turns == 1:
            note(f"waits {self.name}")
            await self.wait()
            note(f"answers {self.name}")
        elif not self.waits:
            note(f"turn {self.turns} {self.name}")
        return "Next.", float(len(action[-1]["content"])), self.turns == TURNS, {}

    async def wait(self) -> None:
        while not all_ended.is_set():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        global left
        note(f"closes {self.name}")
        with lock:  # each may be in a thread
            left -= not self.waits
        if left == 0:
            all_ended.set()


class Blocking(Waiting):
    blocks = True

    async def wait(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        all_ended.wait()


class Hanging(Waiting):
    async def wait(self) -> None:
        if os.environ.get("SIGNAL"):
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()


envs.update(waiting=Waiting, blocking=Blocking, hanging=Hanging)

"""An external plugin: the client of OpenEnv with an environment in place of a server, for ms-swift's real scheduler.

It blocks, as the client does. It counts what the policy writes, ends after two turns, and notes its end in a file.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from swift.rewards import ORM, orms


class GenericEnvClient:
    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def sync(self) -> GenericEnvClient:
        return self

    def __enter__(self) -> GenericEnvClient:
        return self

    def __exit__(self, *_: Any) -> None:
        with open(os.environ["CLOSED"], "a") as file:
            file.write(f"{self._base_url}\n")

    def reset(self, **options: Any) -> SimpleNamespace:
        self._turns = 0
        return SimpleNamespace(observation={"question": options["number"]})

    def step(self, action: dict[str, Any]) -> SimpleNamespace:
        time.sleep(0.05)
        self._turns += 1
        reward = float(len(str(action)) % 7)
        return SimpleNamespace(observation={"turn": self._turns}, reward=reward, done=self._turns == 2)


class Turns(ORM):  # type: ignore[misc, unused-ignore]
    def __call__(self, completions: list[str], rollout_infos: list[dict[str, Any]], **columns: Any) -> list[float]:
        return [float(infos["num_turns"]) for infos in rollout_infos]


module: Any = ModuleType("openenv.core.generic_client")
module.GenericEnvClient = GenericEnvClient
sys.modules |= {name: ModuleType(name) for name in ("openenv", "openenv.core")} | {module.__name__: module}
orms["turns_of_environment"] = Turns

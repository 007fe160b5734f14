"""An external plugin: a scheduler that fails after the first turn, as its tools may."""

from __future__ import annotations

from typing import Any

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Failing(MultiTurnScheduler):
    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return False

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        raise LookupError("the tool is not there")


multi_turns["failing"] = Failing

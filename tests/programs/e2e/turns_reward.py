"""An external plugin: a reward function that reads the infos of environments and checks what ms-swift guarantees."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Turns(ORM):
    def __call__(
        self, completions: list[str], messages: list[Any], rollout_infos: list[dict[str, Any]], **kwargs: Any
    ) -> list[float]:
        for completion, conversation, infos in zip(completions, messages, rollout_infos, strict=True):
            assert conversation[-1]["content"] == completion
            assert all(isinstance(message["content"], str) for message in conversation)
            assert len(infos["step_rewards"]) == infos["num_turns"] == len(conversation) // 2
            assert infos["total_reward"] == sum(infos["step_rewards"])
        return [float(infos["num_turns"]) for infos in rollout_infos]


orms["turns"] = Turns

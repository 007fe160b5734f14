"""verl's buffer of completions, but asked more often. verl loads it: trainer.v1.sampler.custom_sampler.

verl 0.9.1 looks every 2 s whether a rollout is complete, and has no setting for it. A rollout of this benchmark takes
about as long, so its seconds would be those of the wait.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

SECONDS = 0.05


class PromptSampler(ReplayBuffer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=SECONDS, **settings)

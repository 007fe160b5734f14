"""Reader of --rollout_replay: dumped completions and rewards replace the engine and the reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.recording.folder import rollout_path
from swift_megatron_grpo.recording.rows import BadRow, Rewards, from_line
from swift_megatron_grpo.types import Prompt, Rollout


class ReplayError(RuntimeError):
    """The dumped rollouts do not fit this run. The message names the file and the line."""


class RolloutReplay:
    """Reader of dumped rollouts. Every rank reads the files on its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], num_generations: int
    ) -> tuple[list[Rollout], list[Rewards]]:
        """Return the dumped completions of these prompts, and their rewards."""
        path = rollout_path(self._folder, rollout, draw)
        lines = self._lines(path)
        requests = [prompt for prompt in prompts for _ in range(num_generations)]
        if len(lines) != len(requests):
            raise ReplayError(f"{path} has {len(lines)} completions, but this run needs {len(requests)}")
        rollouts, rewards = [], []
        for number, (line, prompt) in enumerate(zip(lines, requests, strict=True), start=1):
            try:
                completion, scores = from_line(line, prompt)
            except BadRow as problem:
                raise ReplayError(f"{path}, line {number}: {problem}") from None
            rollouts.append(completion)
            rewards.append(scores)
        return rollouts, rewards

    def _lines(self, path: Path) -> list[str]:
        try:
            # Not splitlines(), which also splits at other characters that a text may contain.
            with path.open(encoding="utf-8", newline="\n") as file:
                return list(file)
        except FileNotFoundError:
            raise ReplayError(
                f"{path} does not exist: the dumped run ended earlier, or drew fewer prompts for --dynamic_sample"
            ) from None

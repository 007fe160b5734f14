"""Completions and rewards from a folder that --rollout_dump has written, in place of an engine and reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.recording.folder import path_of
from swift_megatron_grpo.recording.rows import BadRow, Rewards, from_line
from swift_megatron_grpo.types import Prompt, Rollout


class ReplayError(RuntimeError):
    """The dumped rollouts do not serve this run. The message names the file and the line."""


class RolloutReplay:
    """Every rank reads the files by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], num_generations: int
    ) -> tuple[list[Rollout], list[Rewards]]:
        path = path_of(self._folder, rollout, draw)
        lines = self._lines(path)
        requests = [prompt for prompt in prompts for _ in range(num_generations)]
        if len(lines) != len(requests):
            raise ReplayError(f"{path} has {len(lines)} completions, and this run asks for {len(requests)}")
        rollouts, rewards = [], []
        for number, (line, prompt) in enumerate(zip(lines, requests, strict=True), start=1):
            try:
                each, scores = from_line(line, prompt)
            except BadRow as problem:
                raise ReplayError(f"{path}, line {number}: {problem}") from None
            rollouts.append(each)
            rewards.append(scores)
        return rollouts, rewards

    def _lines(self, path: Path) -> list[str]:
        try:
            # Not splitlines(): a text may hold other characters that it takes for the end of a line.
            with path.open(encoding="utf-8", newline="\n") as file:
                return list(file)
        except FileNotFoundError:
            raise ReplayError(
                f"there is no {path}: the run that was dumped ended before, or drew fewer prompts for --dynamic_sample"
            ) from None

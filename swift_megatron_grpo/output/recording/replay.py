"""Reader of --rollout_replay: dumped completions and rewards replace the engine and the reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.output.recording.folder import has_checksums, read_lines, rollout_path
from swift_megatron_grpo.output.recording.rows import Digests, Rewards, from_line, no_images, once_per_prompt
from swift_megatron_grpo.output.recording.values import BadRow, Limits
from swift_megatron_grpo.types import Prompt, Rollout


class ReplayError(RuntimeError):
    """The dumped rollouts do not fit this run. The message names the file and the line."""


class RolloutReplay:
    """Reader of dumped rollouts. Every rank reads the files itself."""

    def __init__(self, folder: Path, limits: Limits, digests: Digests = no_images) -> None:
        self._folder = folder
        self._digests = digests
        self._limits = limits
        self._checksums = has_checksums(folder)

    def take(
        self, rollout: int, draw: int, prompts: Sequence[Prompt], num_generations: int
    ) -> tuple[list[Rollout], list[Rewards]]:
        """Return the dumped completions of these prompts, and their rewards."""
        path = rollout_path(self._folder, rollout, draw)
        lines = self._lines(path)
        requests = [prompt for prompt in prompts for _ in range(num_generations)]
        if len(lines) != len(requests):
            raise ReplayError(f"{path} has {len(lines)} completions, but this run needs {len(requests)}")
        rollouts = []
        rewards = []
        images = once_per_prompt(self._digests)
        for number, (line, prompt) in enumerate(zip(lines, requests, strict=True), start=1):
            try:
                completion, scores = from_line(line, prompt, images(prompt), self._limits)
            except BadRow as problem:
                raise ReplayError(f"{path}, line {number}: {problem}") from None
            rollouts.append(completion)
            rewards.append(scores)
        return rollouts, rewards

    def _lines(self, path: Path) -> list[bytes]:
        try:
            return read_lines(path, self._checksums)
        except BadRow as problem:
            raise ReplayError(str(problem)) from None
        except FileNotFoundError:
            raise ReplayError(
                f"{path} does not exist: the dumped run ended earlier, or drew fewer prompts for --dynamic_sample"
            ) from None

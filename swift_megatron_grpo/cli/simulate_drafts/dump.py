"""Reads the tokens of dumped rollouts. Damaged lines are refused by file and line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swift_megatron_grpo.cli.command_line import Refused
from swift_megatron_grpo.cli.simulate_drafts.replay import Completion
from swift_megatron_grpo.output.recording.folder import draw_paths, read_lines, recorded_rollouts
from swift_megatron_grpo.output.recording.rows import BadRow, tokens_of


@dataclass(frozen=True)
class Dumped:
    """The completions of one file, and the log-probs of their sampled tokens."""

    completions: list[Completion]
    logprobs: list[float]


def dump_of(run: Path) -> Path:
    """Return the folder with rollouts; raise Refused if there is none."""
    if recorded_rollouts(run):
        return run
    try:
        settings = json.loads((run / "args.json").read_text(encoding="utf-8"))
        folder = Path(settings["rollout_dump"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        folder = run
    if not recorded_rollouts(folder):
        raise Refused(f"{folder} has no rollouts; give the folder that a run has written with --rollout_dump")
    return folder


def read_dump(folder: Path) -> dict[int, list[Dumped]]:
    """Return the files of each rollout, oldest first; raise Refused if one is damaged."""
    try:
        return {number: list(read_rollout(folder, number)) for number in recorded_rollouts(folder)}
    except (BadRow, OSError) as error:
        raise Refused(error) from error


def read_rollout(folder: Path, number: int) -> Iterator[Dumped]:
    """Yield the files of a rollout, one for each draw of prompts; raise BadRow with file and line."""
    for path in draw_paths(folder, number):
        completions, logprobs = list[Completion](), list[float]()
        for place, line in enumerate(read_lines(path), start=1):
            try:
                tokens = tokens_of(line)
            except BadRow as problem:
                raise BadRow(f"{path}, line {place}: {problem}") from None
            completions.append(Completion(tuple(tokens.prompt_ids), tokens.completion_ids, tokens.sampled))
            logprobs += tokens.logprobs or []
        yield Dumped(completions, logprobs)

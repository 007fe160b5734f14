"""A readable log of completions: completions.jsonl in the run's folder, and tables in wandb and swanlab."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.disk.full_disk import naming_full_disk
from swift_megatron_grpo.settings.recording import CompletionLogging
from swift_megatron_grpo.types import Graded, TokenSequence


def as_tree(sequences: Sequence[TokenSequence], decode: Callable[[list[int]], str]) -> str:
    """Return the text behind the first prompt, and of each further sequence the text from where it leaves another."""
    texts = [decode(sequences[0].completion_ids)]
    for number, sequence in enumerate(sequences[1:], start=1):
        shared = [sum(takewhile(bool, map(eq, sequence.tokens, other.tokens))) for other in sequences[:number]]
        most = max(shared)
        where = f"after {most} tokens of sequence {shared.index(most) + 1}"
        texts.append(f"\n--- sequence {number + 1} of {len(sequences)}, {where} ---\n{decode(sequence.tokens[most:])}")
    return "".join(texts)


@dataclass
class CompletionLog:
    config: CompletionLogging
    reward_names: Sequence[str]
    decode: Callable[[list[int]], str]
    write: Callable[[list[dict[str, Any]]], None]
    writes_here: bool  # True on the one rank that reports to trackers
    rollout: int = 0  # the number of the next one that this run generates

    def append(self, graded: Sequence[Graded]) -> None:
        if not (self.config.log_completions and self.writes_here):
            return
        rows = [self._row(completion) for completion in graded]
        self.rollout += 1
        path = Path(self.config.output_dir, "completions.jsonl")
        with naming_full_disk(path, "--log_completions", "free space there, or leave the flag out"):
            self.write(rows)
        if "wandb" in self.config.report_to:
            import pandas
            import wandb

            frame = pandas.DataFrame(rows)
            if self.config.wandb_log_unique_prompts:
                frame = frame.drop_duplicates(subset=["prompt"])
            wandb.log({"completions": wandb.Table(dataframe=frame)}, commit=False)
        if "swanlab" in self.config.report_to:
            import swanlab

            cells = [list(row.values()) for row in rows]
            swanlab.log({"completions": swanlab.echarts.Table().add(list(rows[0]), cells)})

    def _row(self, graded: Graded) -> dict[str, Any]:
        rollout = graded.rollout
        return {
            "rollout": self.rollout,
            "gen_step": rollout.weights_version,
            "prompt": self.decode(rollout.sequences[0].prompt_ids),
            # of a conversation all turns, as the model reads them
            "completion": rollout.text if rollout.messages is None else as_tree(rollout.sequences, self.decode),
            "tokens": rollout.length,
            "truncated": rollout.truncated,
            **dict(zip(self.reward_names, graded.rewards, strict=True)),
            "total_reward": graded.reward,
            "advantages": graded.advantage,
        }

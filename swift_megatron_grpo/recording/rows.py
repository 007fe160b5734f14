"""One completion with its rewards as one line of JSON, and back, bit for bit. docs/dump_and_replay.md lists the fields.

JSON because it runs no code when it is read, and because pandas and a text editor read it. Python writes a float with
as many digits as it takes to get the same float back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from swift_megatron_grpo.types import Graded, Prompt, Rollout

Rewards = list[float | None]  # one per reward function


class BadRow(ValueError):
    """A line is not what was dumped, or not for this run. The message says what is wrong."""


def to_line(graded: Graded) -> str:
    rollout = graded.rollout
    row = {
        "prompt_id": rollout.prompt.prompt_id,
        "messages": rollout.prompt.row["messages"],
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "logprobs": rollout.logprobs,
        "text": rollout.text,
        "finish_reason": rollout.finish_reason,
        "weights_version": rollout.weights_version,
        "sampled": rollout.sampled,
        "conversation": rollout.messages,
        "infos": rollout.infos,
        "rewards": graded.rewards,
    }
    return json.dumps(row, default=_plain) + "\n"


def from_line(line: str, prompt: Prompt) -> tuple[Rollout, Rewards]:
    """The completion, as one of `prompt`."""
    row = _parse(line)
    try:
        _check_prompt(row, prompt)
        rollout = Rollout(
            prompt=prompt,
            prompt_ids=row["prompt_ids"],
            completion_ids=row["completion_ids"],
            logprobs=row["logprobs"],
            text=row["text"],
            finish_reason=row["finish_reason"],
            weights_version=row["weights_version"],
            sampled=row["sampled"],
            messages=row["conversation"],
            infos=row["infos"],
        )
        return rollout, row["rewards"]
    except KeyError as field:
        raise BadRow(f"the field {field} is missing") from None


def _parse(line: str) -> dict[str, Any]:
    if not line.endswith("\n"):
        raise BadRow("the line is cut off, so the file is not complete")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object but {type(row).__name__}")
    return row


def _check_prompt(row: dict[str, Any], prompt: Prompt) -> None:
    mine: Sequence[Any] = json.loads(json.dumps(prompt.row["messages"], default=_plain))
    if row["prompt_id"] != prompt.prompt_id or row["messages"] != mine:
        raise BadRow(
            f"it completes prompt {row['prompt_id']}, {_shown(row['messages'])}, and this run's next prompt is "
            f"{prompt.prompt_id}, {_shown(mine)}; use the --dataset, --data_seed, --seed and "
            "--train_dataloader_shuffle of the run that was dumped"
        )


def _shown(messages: Sequence[Any]) -> str:
    text = str(messages[-1].get("content"))
    return repr(text if len(text) <= 60 else text[:60] + " ...")


def _plain(value: Any) -> Any:
    """What JSON has no word for: numpy's numbers and arrays are written as lists and numbers, the rest as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)

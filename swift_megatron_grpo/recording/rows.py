"""One completion with its rewards as one line of JSON, and back, bit for bit. docs/dump_and_replay.md lists the fields.

JSON, because reading it executes no code, and because pandas and text editors read it. Python writes a float with as
many digits as are needed to read the same float back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from swift_megatron_grpo.types import Graded, Prompt, Rollout

Rewards = list[float | None]  # one per reward function


class BadRow(ValueError):
    """A line is damaged or belongs to another run. The message contains the reason."""


def to_line(graded: Graded) -> str:
    """Serialise a completion and its rewards."""
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
    """Parse a line as a completion of `prompt`; raise BadRow if it is not one."""
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
        raise BadRow("the line is cut off, so the file is incomplete")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object but {type(row).__name__}")
    return row


def _check_prompt(row: dict[str, Any], prompt: Prompt) -> None:
    expected: Sequence[Any] = json.loads(json.dumps(prompt.row["messages"], default=_plain))
    if row["prompt_id"] != prompt.prompt_id or row["messages"] != expected:
        raise BadRow(
            f"it completes prompt {row['prompt_id']}, {_shown(row['messages'])}, but the next prompt of this run is "
            f"{prompt.prompt_id}, {_shown(expected)}; use the same --dataset, --data_seed, --seed and "
            "--train_dataloader_shuffle as the dumped run"
        )


def _shown(messages: Sequence[Any]) -> str:
    text = str(messages[-1].get("content"))
    return repr(text if len(text) <= 60 else text[:60] + " ...")


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent: numpy to numbers and lists, everything else to text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)

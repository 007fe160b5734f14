"""One completion with its rewards as one line of JSON, and back, bit for bit. docs/dump_and_replay.md lists the fields.

JSON, because reading it executes no code, and because pandas and text editors read it. Python writes a float with as
many digits as are needed to read the same float back. The last field of a line is the CRC-32 of what precedes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swift_megatron_grpo.output.disk.files import checksum
from swift_megatron_grpo.output.recording.values import BadRow, Limits, check_values
from swift_megatron_grpo.packing.expert_rows import decode_rows, encode_rows
from swift_megatron_grpo.types import ExpertRows, Graded, Prompt, Rollout

Rewards = list[float | None]  # one per reward function
_END = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\n\Z')


Digests = Callable[[Prompt], Sequence[str]]  # of the prompt's images; a line holds no bytes of them


def no_images(prompt: Prompt) -> Sequence[str]:
    """Return the digests of a prompt of text."""
    return ()


def once_per_prompt(digests: Digests) -> Digests:
    """Return the same function, which reads the images of a prompt once for all its completions."""
    known: dict[str, Sequence[str]] = {}

    def of_prompt(prompt: Prompt) -> Sequence[str]:
        if prompt.prompt_id not in known:
            known[prompt.prompt_id] = digests(prompt)
        return known[prompt.prompt_id]

    return of_prompt


def to_line(graded: Graded, images: Sequence[str]) -> str:
    """Serialise a completion and its rewards. `images`: the digests of those of the prompt."""
    rollout = graded.rollout
    row = {
        "prompt_id": rollout.prompt.prompt_id,
        "messages": rollout.prompt.row["messages"],
        "images": list(images),
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
    if rollout.routed_experts is not None:  # most models have no experts, and earlier versions read no such field
        row["routed_experts"] = encode_rows(rollout.routed_experts)
    content = json.dumps(row, default=_plain).removesuffix("}")
    return f'{content}, "crc32": "{checksum(content.encode())}"}}\n'


def check_line(line: bytes, must_have_checksum: bool) -> None:
    """Raise BadRow if a line is cut off, or if its content is not that of its checksum."""
    if not line.endswith(b"\n"):
        raise BadRow("the line is cut off, so the file is incomplete; copy it again from the original dump")
    end = _END.search(line)
    if end is None:
        if must_have_checksum:
            raise BadRow("the line is damaged: it has no checksum; copy the file again from the original dump")
    elif checksum(line[: end.start()]) != end[1].decode():
        raise BadRow("the line is damaged: its checksum does not match; copy the file again from the original dump")


def from_line(line: bytes, prompt: Prompt, images: Sequence[str], limits: Limits) -> tuple[Rollout, Rewards]:
    """Parse a line that `check_line` has accepted as a completion of `prompt`; raise BadRow if it is not one."""
    row = _parse(line)
    try:
        check_values(row, limits)
        _check_prompt(row, prompt)
        _check_images(row, prompt, images)
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
            routed_experts=_experts(row),
        )
        return rollout, row["rewards"]
    except KeyError as field:
        raise BadRow(f"the field {field} is missing") from None


def _experts(row: dict[str, Any]) -> ExpertRows | None:
    try:
        rows = decode_rows(row.get("routed_experts"))
    except ValueError as problem:
        raise BadRow(f"routed_experts cannot be read: {problem}") from None
    tokens = len(row["prompt_ids"]) + len(row["completion_ids"])
    if rows is not None and len(rows) >= tokens:
        raise BadRow(f"routed_experts has {len(rows)} rows for {tokens} tokens, of which the last one never ran")
    return rows


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
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


def _check_images(row: dict[str, Any], prompt: Prompt, images: Sequence[str]) -> None:
    if row.get("images", []) != list(images):  # dumps of earlier versions have no images
        raise BadRow(
            f"prompt {prompt.prompt_id} was completed with other images than those of the dataset; use the files of "
            "the dumped run"
        )


def _shown(messages: Sequence[Any]) -> str:
    text = str(messages[-1].get("content"))
    return repr(text if len(text) <= 60 else text[:60] + " ...")


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent: numpy to numbers and lists, everything else to text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)

"""One completion with its rewards as one line of JSON, and back, bit for bit. docs/dump_and_replay.md lists the fields.

JSON, because reading it executes no code, and because pandas and text editors read it. Python writes a float with as
many digits as are needed to read the same float back. The last field of a line is the CRC-32 of what precedes it.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift_megatron_grpo.output.disk.files import checksum
from swift_megatron_grpo.packing.expert_rows import decode_rows, encode_rows
from swift_megatron_grpo.types import ExpertRows, Graded, Prompt, Rollout, Span, TokenSequence, span_problem

Rewards = list[float | None]  # one per reward function
Digests = Callable[[Prompt], Sequence[str]]  # of the prompt's images; a line holds no bytes of them
# fields of a line that have the name of the field of Rollout
_OF_ROLLOUT = (
    "prompt_ids", "completion_ids", "logprobs", "text", "finish_reason", "weights_version", "sampled", "infos",
)  # fmt: skip
_OF_SEQUENCE = ("prompt_ids", "completion_ids", "logprobs", "sampled")  # and the same of an earlier one
_ROUNDING = 1e-3  # an engine may round a log-prob of 0 up
_LARGEST_TOKEN = 2**31 - 1
_END = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\n\Z')


class BadRow(ValueError):
    """A line is damaged or belongs to another run. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the values of a completion must fit, from the model and the flags of this run."""

    vocabulary: int  # rows of the model's embedding
    reward_functions: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one line, which an engine received and returned."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampled: list[bool] | None
    logprobs: list[float] | None


def no_images(prompt: Prompt) -> Sequence[str]:
    return ()


def once_per_prompt(digests: Digests) -> Digests:
    """Return the same function, which reads the images of a prompt once for all its completions."""
    known: dict[str, Sequence[str]] = {}

    def of_prompt(prompt: Prompt) -> Sequence[str]:
        if prompt.prompt_id not in known:
            known[prompt.prompt_id] = digests(prompt)
        return known[prompt.prompt_id]

    return of_prompt


def to_lines(completions: Iterable[Graded], digests: Digests) -> Iterator[str]:
    images = once_per_prompt(digests)
    for graded in completions:
        rollout = graded.rollout
        row = {
            "prompt_id": rollout.prompt.prompt_id,
            "messages": rollout.prompt.row["messages"],
            "images": list(images(rollout.prompt)),
            **{name: getattr(rollout, name) for name in _OF_ROLLOUT},
            "conversation": rollout.messages,
            "rewards": graded.rewards,
        }
        if rollout.spans is not None:
            row["spans"] = rollout.spans
        if rollout.routed_experts is not None:  # most models have no experts
            row["routed_experts"] = encode_rows(rollout.routed_experts)
        if rollout.earlier:
            row["earlier"] = [
                {name: getattr(sequence, name) for name in (*_OF_SEQUENCE, "spans")} for sequence in rollout.earlier
            ]
        yield sealed(row)


def sealed(row: Mapping[str, Any]) -> str:
    content = json.dumps(row, default=_plain).removesuffix("}")
    return f'{content}, "crc32": "{checksum(content.encode())}"}}\n'


def check_line(line: bytes) -> None:
    """Raise BadRow if a line is cut off, or if its content is not that of its checksum."""
    if not line.endswith(b"\n"):
        raise BadRow("the line is cut off, so the file is incomplete; copy it again from the original dump")
    end = _END.search(line)
    if end is None or checksum(line[: end.start()]) != end[1].decode():
        fault = "it has no checksum" if end is None else "its checksum does not match"
        raise BadRow(f"the line is damaged: {fault}; copy the file again from the original dump")


def parsed(line: bytes) -> dict[str, Any]:
    """Return the content of a line that `check_line` has accepted, which is an object if it is JSON."""
    try:
        row: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"it cannot be read: {error}") from None
    return row


def from_line(line: bytes, prompt: Prompt, images: Sequence[str], limits: Limits) -> tuple[Rollout, Rewards]:
    """Parse a line that `check_line` has accepted as a completion of `prompt`; raise BadRow if it is not one."""
    row = parsed(line)
    try:
        _check_values(row, limits)
        _check_prompt(row, prompt, images)
        values = {name: row[name] for name in _OF_ROLLOUT}
        earlier = tuple(
            TokenSequence(spans=_spans(sequence), **{name: sequence[name] for name in _OF_SEQUENCE})
            for sequence in row.get("earlier", [])
        )
        rollout = Rollout(
            prompt,
            messages=row["conversation"],
            spans=_spans(row),
            routed_experts=_experts(row),
            earlier=earlier,
            **values,
        )
        problem = span_problem(
            [(each.spans, sum(each.sampled_mask)) for each in rollout.sequences], rollout.weights_version
        )
        _require(problem is None, "spans", [each.spans for each in rollout.sequences], f"and {problem}")
        return rollout, row["rewards"]
    except KeyError as field:
        raise BadRow(f"the field {field} is missing") from None


def tokens_of(line: bytes) -> Tokens:
    """Parse the tokens of a line that `check_line` has accepted, of any model; raise BadRow if they are none."""
    row = parsed(line)
    try:
        _check_tokens(row, _LARGEST_TOKEN, "which is not a token")
        return Tokens(row["prompt_ids"], row["completion_ids"], row["sampled"], row["logprobs"])
    except KeyError as field:
        raise BadRow(f"the field {field} is missing") from None


def _spans(sequence: Mapping[str, Any]) -> list[Span] | None:
    """Return the spans of a row or of an earlier sequence; only servers that are updated in flight send them."""
    spans = sequence.get("spans")
    if spans is None:
        return None
    _check_list("spans", spans, "pairs", _is_span, "which is not a version and a number of tokens")
    return [(version, tokens) for version, tokens in spans]


def _experts(row: dict[str, Any]) -> ExpertRows | None:
    try:
        rows = decode_rows(row.get("routed_experts"))
    except ValueError as problem:
        raise BadRow(f"routed_experts cannot be read: {problem}") from None
    tokens = len(row["prompt_ids"]) + len(row["completion_ids"])
    if rows is not None and len(rows) >= tokens:
        raise BadRow(f"routed_experts has {len(rows)} rows for {tokens} tokens, of which the last one never ran")
    return rows


def _check_prompt(row: Mapping[str, Any], prompt: Prompt, images: Sequence[str]) -> None:
    expected: Sequence[Any] = json.loads(json.dumps(prompt.row["messages"], default=_plain))
    if row["prompt_id"] != prompt.prompt_id or row["messages"] != expected:
        typed, wanted = (_shortened(str(messages[-1].get("content"))) for messages in (row["messages"], expected))
        raise BadRow(
            f"it completes prompt {row['prompt_id']}, {typed!r}, but the next prompt of this run is "
            f"{prompt.prompt_id}, {wanted!r}; use the same --dataset, --data_seed, --seed and "
            "--train_dataloader_shuffle as the dumped run"
        )
    if row["images"] != list(images):
        raise BadRow(
            f"prompt {prompt.prompt_id} was completed with other media than those of the dataset; use the files of the "
            "dumped run"
        )


# ---- values: these checks find what a checksum cannot, a dump that was edited or written with another model


def _check_values(row: Mapping[str, Any], limits: Limits) -> None:
    """Raise BadRow for the first value that no run could have written. KeyError: a field is missing."""
    last = limits.vocabulary - 1
    _check_tokens(row, last, f"but the model has the tokens 0 to {last}; use the --model of the dumped run")
    _check_list(
        "earlier", row.get("earlier", []), "sequences", lambda each: isinstance(each, dict), "which is not a sequence"
    )
    for sequence in row.get("earlier", []):
        known = {name: sequence[name] for name in _OF_SEQUENCE} | {"conversation": row["conversation"]}
        _check_tokens(known, last, f"but the model has the tokens 0 to {last}; use the --model of the dumped run")
    _check_list("rewards", row["rewards"], "numbers", _is_reward, "which is neither a number nor null")
    _check_length("rewards", row["rewards"], limits.reward_functions, "reward functions")
    for field, kind in (("prompt_id", str), ("text", str), ("finish_reason", str), ("infos", dict)):
        _require(isinstance(row[field], kind), field, row[field], f"which is not a {kind.__name__}")
    conversations = [] if row["conversation"] is None else ["conversation"]
    for field in ("messages", *conversations):
        _check_list(field, row[field], "messages", lambda message: isinstance(message, dict), "which is not a message")
        _require(bool(row[field]), field, row[field], "which is not a list of messages")
    version = row["weights_version"]
    _require(type(version) is int and version >= 0, "weights_version", version, "which is not the number of a step")


def _check_tokens(row: Mapping[str, Any], last: int, beyond: str) -> None:
    never_empty = ["prompt_ids", "completion_ids"] if row["conversation"] is None else ["prompt_ids"]
    for field in ("prompt_ids", "completion_ids"):
        _check_list(field, row[field], "tokens", lambda token: type(token) is int and 0 <= token <= last, beyond)
        _require(bool(row[field]) or field not in never_empty, field, row[field], "which has no token")
    trained = len(row["completion_ids"])
    if row["sampled"] is not None:
        _check_list("sampled", row["sampled"], "flags", lambda flag: type(flag) is bool, "which is not a flag")
        _check_length("sampled", row["sampled"], trained, "tokens of completion_ids")
        trained = sum(row["sampled"])
    if row["logprobs"] is not None:
        _check_list("logprobs", row["logprobs"], "numbers", _is_logprob, "which is not a finite number up to 0")
        _check_length("logprobs", row["logprobs"], trained, "sampled tokens")


def _check_list(field: str, values: Any, kind: str, fits: Callable[[Any], bool], fault: str) -> None:
    _require(isinstance(values, list), field, values, f"which is not a list of {kind}")
    wrong = next((index for index, value in enumerate(values) if not fits(value)), None)
    if wrong is not None:
        _require(False, f"{field}[{wrong}]", values[wrong], fault)


def _check_length(field: str, values: Sequence[Any], count: int, owners: str) -> None:
    if len(values) != count:
        raise BadRow(f"{field} has {len(values)} values for {count} {owners}")


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value <= _ROUNDING


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [int, int]


def _is_reward(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _require(fits: bool, field: str, value: Any, fault: str) -> None:
    if not fits:
        raise BadRow(f"{field} is {_shortened(repr(value))}, {fault}")


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + " ..."


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent: numpy to numbers and lists, everything else to text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)

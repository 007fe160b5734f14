"""Write the tables of refused flags and of refused settings of vLLM into README.md, between two comments.

    python scripts/write_support_table.py

The contents come from arguments/support_table.py and generation/vllm/engine_kwargs.py in swift_megatron_grpo;
tests/unit/test_readme.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from swift_megatron_grpo.arguments.support_table import NOT_YET, NOTED, Note, Refusal
from swift_megatron_grpo.generation.vllm.engine_kwargs import REFUSED

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- refused flags, by scripts/write_support_table.py -->\n"
END = "<!-- end of refused flags -->\n"


def table(refused: Mapping[str, Refusal] = NOT_YET) -> str:
    """Return a Markdown table with one row for every reason and the flags it applies to."""
    by_reason: dict[tuple[str, bool], list[str]] = {}
    for flag, refusal in refused.items():
        by_reason.setdefault((refusal.why, refusal.stock), []).append(_described(flag, refusal))
    rows = [f"| {', '.join(flags)} | {why} | {'yes' if stock else 'no'} |" for (why, stock), flags in by_reason.items()]
    head = ["| refused, but for the values in brackets | why | ms-swift's own trainer has it |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def notes_table(noted: Mapping[str, Note] = NOTED) -> str:
    """Return a Markdown table of the flags that are accepted with a line in the log."""
    rows = [f"| `--{flag}` | {note.why} |" for flag, note in noted.items()]
    return "\n".join(["| without effect | why |", "| --- | --- |", *rows]) + "\n"


def engine_table(refused: Mapping[str, str] = REFUSED) -> str:
    """Return a Markdown table with one row for every reason and the settings of vLLM that it applies to."""
    by_reason: dict[str, list[str]] = {}
    for name, why in refused.items():
        flag = why.removeprefix("use ") if why.startswith("use --") else None
        reason = "the flag in brackets sets it" if flag else why
        by_reason.setdefault(reason, []).append(f"`{name}`" + (f" (`{flag}`)" if flag else ""))
    rows = [f"| {', '.join(names)} | {why} |" for why, names in by_reason.items()]
    return "\n".join(["| refused | why |", "| --- | --- |", *rows]) + "\n"


def with_table(readme: str, refused: Mapping[str, Refusal] = NOT_YET) -> str:
    before, rest = readme.split(BEGIN)
    summary = f"<summary>The {len(refused)} flags that are refused, with the values that work</summary>"
    of_engine = f"The {len(REFUSED)} settings of vLLM that --vllm_engine_kwargs refuses, also in swift rollout"
    folded = [f"<details>\n{summary}\n\n{table(refused)}\n</details>\n"]
    noted = f"<summary>The {len(NOTED)} flags that are accepted and change nothing, with a line in the log</summary>"
    folded += [f"<details>\n{noted}\n\n{notes_table()}\n</details>\n"]
    folded += [f"<details>\n<summary>{of_engine}</summary>\n\n{engine_table()}\n</details>\n"]
    return before + BEGIN + "\n".join(folded) + END + rest.split(END)[1]


def _described(flag: str, refusal: Refusal) -> str:
    values = [_as_typed(value) for value in refusal.allowed if value not in (None, False, [], 0)]
    return f"`--{flag}`" + (f" ({', '.join(values)})" if values else "")


def _as_typed(value: Any) -> str:
    plain = value.name if isinstance(value, Enum) else value
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))

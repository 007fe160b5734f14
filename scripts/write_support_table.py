"""Write docs/limitations.md, and the table of model types in docs/models.md.

    python -m scripts.write_support_table

The contents come from arguments/refused.py and generation/vllm/engine_kwargs.py in swift_megatron_grpo;
tests/unit/docs/test_generated_pages.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from swift_megatron_grpo.arguments.refused import (
    COMPOSITE,
    NOT_YET,
    NOTED,
    OMNI,
    ON_TEXT_ALONE,
    READ_AS,
    READ_WITH,
    REFUSED_COMPOSITE,
    REFUSED_TEXT,
    TAKES_IMAGES,
    TAKES_RECORDINGS,
    TAKES_VIDEOS,
    TEXT,
    WITHOUT_ENGINE,
    Refusal,
)
from swift_megatron_grpo.generation.vllm.engine_kwargs import REFUSED

PAGE = Path(__file__).parents[1] / "docs" / "limitations.md"
MODELS = PAGE.with_name("models.md")
BEGIN, END = "<!-- types, by scripts/write_support_table.py -->\n", "<!-- end of types -->\n"
INTRODUCTION = """\
Every flag of `megatron rlhf` either works, or is refused before a model loads, with the reason and a value that works.
Where the last column says yes, ms-swift's own trainer supports the other values: `SWIFT_MEGATRON_GRPO=off` starts it.
This page lists all refused flags and settings; `python -m scripts.write_support_table` writes it.
"""


def table(refused: Mapping[str, Refusal] = NOT_YET) -> str:
    """Return a Markdown table with one row for every reason and the flags it applies to."""
    by_reason: dict[tuple[str, bool], list[str]] = {}
    for flag, refusal in refused.items():
        by_reason.setdefault((refusal.why, refusal.stock), []).append(_described(flag, refusal))
    rows = [f"| {', '.join(flags)} | {why} | {'yes' if stock else 'no'} |" for (why, stock), flags in by_reason.items()]
    head = ["| refused, but for the values in brackets | why | ms-swift's own trainer has it |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def notes_table(noted: Mapping[str, tuple[Any, str]] = NOTED) -> str:
    """Return a Markdown table of the flags that are accepted with a line in the log."""
    rows = [f"| `--{flag}` | {why} |" for flag, (_, why) in noted.items()]
    for needed, _, flags in READ_WITH:
        listed = ", ".join(f"`--{flag}`" for flag in flags.split())
        rows.append(f"| {listed} | only a run with `{needed}` reads {'them' if ' ' in flags else 'it'} |")
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


def types_table() -> str:
    """Return a Markdown table of all types that mcore-bridge converts: trained, or refused with the reason."""
    states = dict.fromkeys(TEXT, "trained: text")
    states |= dict.fromkeys(
        WITHOUT_ENGINE, "trained: text; not with vLLM in a test, because it cannot run them on a CPU"
    )
    states |= {name: f"trained: mcore-bridge reads it as a {base}" for name, base in READ_AS.items()}
    states |= {
        name: "trained: text, images and videos"
        if name in TAKES_VIDEOS
        else "trained: text and images; rows with videos are refused"
        for name in COMPOSITE
    }
    for name in (*OMNI, *ON_TEXT_ALONE):
        heard = all(name in takes for takes in (TAKES_IMAGES, TAKES_RECORDINGS, TAKES_VIDEOS))
        states[name] = (
            "trained: text, images, videos and audio" if heard else "trained: text; rows with media are refused"
        )
    states |= {name: f"refused: {why}" for name, why in {**REFUSED_TEXT, **REFUSED_COMPOSITE}.items()}
    rows = [
        f"| {', '.join(f'`{name}`' for name, its in states.items() if its == state)} | {state} |"
        for state in dict.fromkeys(states.values())
    ]
    return "\n".join(["| `model_type` of config.json | state |", "| --- | --- |", *rows]) + "\n"


def with_types(page: str) -> str:
    """Return docs/models.md with this table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + types_table() + END + rest.split(END)[1]


def page(refused: Mapping[str, Refusal] = NOT_YET) -> str:
    return f"""# Limitations

{INTRODUCTION}
## Refused flags

The {len(refused)} flags that are refused, with the values that work in brackets.

{table(refused)}
## Flags without effect

Flags that are accepted and change nothing, with a line in the log: the first {len(NOTED)} in every run, the
others in a run that does not read them.

{notes_table()}
## Refused settings of vLLM

The settings that `--vllm_engine_kwargs` refuses, in `swift rollout` as well. A name that ends in `_` stands for all
settings that begin with it. A value that the engine has anyway, such as `"data_parallel_size": 1`, is accepted. All
other settings are passed to vLLM.

{engine_table()}"""


def _described(flag: str, refusal: Refusal) -> str:
    values = [_as_typed(value) for value in refusal.allowed if value not in (None, False, [], 0)]
    return f"`--{flag}`" + (f" ({', '.join(values)})" if values else "")


def _as_typed(value: Any) -> str:
    plain = value.name if isinstance(value, Enum) else value
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


if __name__ == "__main__":
    PAGE.write_text(page())
    MODELS.write_text(with_types(MODELS.read_text()))

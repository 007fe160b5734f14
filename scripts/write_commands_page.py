"""Write docs/commands.md, the page of the command `swift-megatron-grpo`, from its parsers.

    python -m scripts.write_commands_page

tests/unit/docs/test_generated_pages.py compares page and code.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from swift_megatron_grpo.cli.main import COMMANDS, PROGRAM, parser_of

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
PAGES = {
    "check": "check.md",
    "check-script": "scripts.md",
    "check-layouts": "models.md",
    "convert": "migration.md",
    "get-model": "models.md",
    "report": "report.md",
    "simulate-drafts": "speculation.md",
}
HEAD = f"""\
# The command {PROGRAM}

`python -m swift_megatron_grpo.cli` is the same command, for a checkout that is not installed. Options have one
spelling, as ms-swift's flags have: with underscores. A misspelt option or subcommand gets a suggestion.

| exit code | |
| --- | --- |
| 0 | nothing was found |
| 1 | something stands against the run: standard output lists it, or standard error says what it is |
| 2 | the command line is wrong |

This page is written by `python -m scripts.write_commands_page` from the code.
"""


def page() -> str:
    """Return the page: an overview, and the --help of each subcommand."""
    rows = [f"| [`{name}`](#{name}) | {summary} |" for name, (_, summary) in COMMANDS.items()]
    overview = "\n".join(["| subcommand | |", "| --- | --- |", *rows]) + "\n"
    return "\n".join([HEAD, overview, *map(_section, COMMANDS)])


def _section(name: str) -> str:
    with patch.dict(os.environ, COLUMNS="100"):
        text = parser_of(name).format_help()
    more = f"\nSee [{PAGES[name]}]({PAGES[name]}).\n" if name in PAGES else ""
    return f"## {name}\n\n```text\n{text}```\n{more}"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Write the tables of docs/migration.md, between two comments, from the tables in swift_megatron_grpo/cli/convert.

    python scripts/write_migration_tables.py

tests/unit/cli/convert/test_convert.py compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swift_megatron_grpo.cli.convert.tables import ByHand, Computed, Needless, Rule, Table
from swift_megatron_grpo.cli.convert.trainers import ROLL, SLIME
from swift_megatron_grpo.cli.convert.trl import TRL
from swift_megatron_grpo.cli.convert.verl import VERL

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
BEGIN = "<!-- keys, by scripts/write_migration_tables.py -->\n"
END = "<!-- end of keys -->\n"
TITLES = {"verl and siiRL": VERL, "slime": SLIME, "ROLL": ROLL, "TRL": TRL}


def rows(table: Table) -> Iterator[tuple[str, str]]:
    """Yield keys, and what becomes of them. Neighbours with the same end share a row."""
    for group in table.together:
        yield ", ".join(f"`{key}`" for key in group.keys.values()), f"together: {_flags(group.flags)}"
    keys: list[str] = []
    last = ""
    for key, rule in table.rules.items():
        if keys and _described(rule) != last:
            yield ", ".join(keys), last
            keys = []
        keys.append(f"`{key}`")
        last = _described(rule)
    yield ", ".join(keys), last


def _described(rule: Rule) -> str:
    match rule:
        case str(names):
            return _flags(names.split())
        case Needless(why):
            return f"not needed: {why}"
        case ByHand(what):
            return f"by hand: {what}"
        case Computed(flags, _):
            return _flags(flags) if flags else "its only value that is possible here"


def _flags(names: object) -> str:
    assert isinstance(names, list | tuple)
    return ", ".join(f"`{name}`" if name.isupper() else f"`--{name}`" for name in names)


def with_tables(page: str) -> str:
    before, rest = page.split(BEGIN)
    sections = []
    for title, table in TITLES.items():
        body = [f"| {keys} | {end} |" for keys, end in rows(table)]
        sections.append("\n".join([f"## {title}\n", "| key | here |", "| --- | --- |", *body]) + "\n")
    return before + BEGIN + "\n".join(sections) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

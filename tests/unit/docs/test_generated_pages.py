"""Pages are what their scripts write, and every example of docs/flags.md has the type of its flag."""

from __future__ import annotations

import json

import pytest

from scripts import (
    write_api_page,
    write_commands_page,
    write_flags_page,
    write_memory_page,
    write_structure_table,
    write_support_table,
)
from scripts.write_flags_page import Flag
from scripts.write_support_table import engine_table, page, table
from swift_megatron_grpo.arguments.refused import Refusal


def all_flags() -> list[Flag]:
    return [
        *write_flags_page.all_flags(),
        *write_flags_page.flags(write_flags_page.PACKAGE / "generation" / "server" / "arguments.py"),
    ]


def test_the_page_of_flags_is_that_of_the_code() -> None:
    assert write_flags_page.page() == write_flags_page.PAGE.read_text(), "run scripts/fix"


def test_the_python_api_is_that_of_the_docstrings() -> None:
    assert write_api_page.page() == write_api_page.PAGE.read_text(), "run scripts/fix"


def test_the_page_of_limitations_is_that_of_the_code() -> None:
    assert page() == write_support_table.PAGE.read_text(), "run scripts/fix"


def test_the_table_of_types_is_that_of_the_code() -> None:
    page = write_support_table.MODELS.read_text()
    assert write_support_table.with_types(page) == page, "run scripts/fix"


def test_the_numbers_of_the_structure_are_those_of_the_code() -> None:
    """Sizes may differ by a tenth, so that not every change has to write them."""
    page, now = write_structure_table.PAGE.read_text(), write_structure_table.sizes()
    written = write_structure_table.written_sizes(page)
    assert written.keys() == now.keys(), "run scripts/fix"
    for name, size in now.items():
        assert size.lines == pytest.approx(written[name].lines, rel=0.1), f"{name}: run scripts/fix"
    facts = write_structure_table.facts()
    assert write_structure_table.with_table(page, write_structure_table.table(written, facts)) == page, (
        "run scripts/fix"
    )


def test_a_climb_and_a_circle_are_counted() -> None:
    arrows = {("loop", "packing"), ("packing", "loop"), ("trainer", "loop")}
    assert write_structure_table.climbs(arrows) == {("packing", "loop")}
    assert write_structure_table.circles(arrows) == {frozenset({"loop", "packing"})}


def test_flags_with_one_reason_share_a_row_of_the_table() -> None:
    refused = {
        "one": Refusal((None,), "not there"),
        "two": Refusal((False, "a", "b"), "not there"),
        "three": Refusal((True,), "not there", stock=False),
    }
    rows = [
        "| `--one`, `--two` (a, b) | not there | yes |",
        "| `--three` (true) | not there | no |",
    ]
    assert table(refused).splitlines()[2:] == rows
    assert rows[0] in page(refused) and "The 3 flags" in page(refused)
    assert engine_table({"one": "not there", "two": "use --seed", "three": "not there"}).splitlines()[2:] == [
        "| `one`, `three` | not there |",
        "| `two` (`--seed`) | the flag in brackets sets it |",
    ]


def test_the_page_of_commands_is_that_of_the_code() -> None:
    page = write_commands_page.page()
    assert page == write_commands_page.PAGE.read_text(), "run python -m scripts.write_commands_page"


def test_the_table_of_memory_is_that_of_the_plan() -> None:
    page = write_memory_page.PAGE.read_text()
    assert write_memory_page.with_table(page) == page, "run scripts/fix"


def test_every_flag_of_the_table_of_memory_changes_the_plan() -> None:
    rows = [row.split(" | ", 1) for row in write_memory_page.table().splitlines()[2:]]
    first = rows[0][1]
    assert len(rows) > 10 and all(values != first for _, values in rows[1:])


@pytest.mark.parametrize("flag", all_flags(), ids=lambda flag: flag.name)
def test_an_example_is_a_value_of_the_flag_and_not_its_default(flag: Flag) -> None:
    example = flag.example
    assert example != "VALUE", f"the type {flag.type} is not known"
    assert example != write_flags_page.as_typed(flag.default)
    if flag.choices:
        assert example in flag.choices
    elif flag.type == "JSON":
        assert isinstance(json.loads(example.strip("'")), dict)
    elif flag.type in ("integer", "number"):
        assert (int if flag.type == "integer" else float)(example) >= 0
    elif flag.type == "true, false":
        assert example in ("true", "false")


def test_every_class_with_flags_has_a_section() -> None:
    listed = [group for groups in write_flags_page.AREAS.values() for group in groups]
    missing = {flag.group for flag in write_flags_page.all_flags()} - {*listed}
    assert not missing, f"add {missing} to AREAS of scripts/write_flags_page.py"
    assert len(listed) == len({*listed})

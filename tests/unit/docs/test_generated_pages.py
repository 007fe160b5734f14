"""docs/flags.md is what scripts/write_flags_page.py writes, and every example of it has the type of its flag."""

from __future__ import annotations

import json

import pytest

from scripts import write_flags_page
from scripts.write_flags_page import Flag


def all_flags() -> list[Flag]:
    return [
        *write_flags_page.flags(),
        *write_flags_page.flags(write_flags_page.PACKAGE / "server" / "arguments.py"),
    ]


def test_the_page_of_flags_is_that_of_the_code() -> None:
    assert write_flags_page.page() == write_flags_page.PAGE.read_text(), "run python scripts/write_flags_page.py"


@pytest.mark.parametrize("flag", all_flags(), ids=lambda flag: flag.name)
def test_an_example_is_a_value_of_the_flag_and_not_its_default(flag: Flag) -> None:
    example = flag.example
    assert example != write_flags_page.as_typed(flag.default)
    if flag.choices:
        assert example in flag.choices
    elif flag.type == "JSON":
        assert isinstance(json.loads(example.strip("'")), dict)
    elif flag.type in ("integer", "number"):
        assert (int if flag.type == "integer" else float)(example) >= 0
    elif flag.type == "true, false":
        assert example in ("true", "false")


def test_a_flag_has_the_area_of_its_name_or_of_its_beginning() -> None:
    assert write_flags_page.area_of("ref_context_parallel_size") == "Reference model"
    assert write_flags_page.area_of("bad_reward") == "Rewards and evaluation"
    assert write_flags_page.area_of("something_new") == write_flags_page.OTHER

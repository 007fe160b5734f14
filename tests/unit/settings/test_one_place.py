"""A new flag is one field in the class of its stage: everything that knows about flags finds it there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import write_flags_page
from tests.paths import REPOSITORY
from tests.support.interpreter import result_of

FIELD = """
    tea_break: Annotated[float | None, Above(0, use=15)] = flag(
        None, "Minutes without a step, in which the run drinks tea. Default: none.", example="20"
    )
"""
ALL_PLACES = """
    import dataclasses
    import swift_megatron_grpo
    swift_megatron_grpo.__path__[:] = [PACKAGE]
    from transformers import HfArgumentParser
    from swift_megatron_grpo.arguments.command_line import check_typed
    from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
    from swift_megatron_grpo.settings.groups import GROUPS
    from swift_megatron_grpo.settings.layout import Facts, Layout
    from swift_megatron_grpo.settings.time_limits import TimeLimits

    def refusal(*typed):
        try:
            return check_typed(typed)
        except ValueError as fault:
            return str(fault)

    parser = HfArgumentParser([GRPOArguments])
    option = parser._option_string_actions["--tea_break"]
    values = {field.name: field.default for field in dataclasses.fields(GRPOArguments)} | {"tea_break": 0.0}
    result = {
        "file": swift_megatron_grpo.settings.time_limits.__file__,
        "default": option.default,
        "type": option.type.__name__,
        "help": " ".join(parser.format_help().split()),
        "accepted": refusal("--tea_break", "20"),
        "mistyped": refusal("--tea_brake", "20"),
        "no number": refusal("--tea_break", "long"),
        "out of range": list(TimeLimits.of(values).faults(Facts(Layout(1)))),
        "described": [f.name for group in GROUPS for f in dataclasses.fields(group) if "flag" in f.metadata],
    }
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this package with one more field in one class."""
    copy = tmp_path_factory.mktemp("copy") / "swift_megatron_grpo"
    shutil.copytree(REPOSITORY / "swift_megatron_grpo", copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "settings" / "time_limits.py"
    before, after = file.read_text().split("\n    phase_timeout: ")
    file.write_text(f"{before}{FIELD}    phase_timeout: {after}")
    return copy


def test_parser_help_ranges_and_messages_have_a_new_field(package: Path) -> None:
    found: dict[str, Any] = result_of(ALL_PLACES.replace("PACKAGE", repr(str(package))))
    assert found["file"] == str(package / "settings" / "time_limits.py")
    assert (found["default"], found["type"], found["accepted"]) == (None, "float", None)
    assert "Minutes without a step, in which the run drinks tea." in found["help"]
    assert found["mistyped"] == "--tea_brake is not a flag; did you mean --tea_break?"
    assert found["no number"] == "--tea_break long is not a number; use --tea_break 15"
    assert found["out of range"] == ["--tea_break 0 must be above 0; use --tea_break 15, or leave it out"]
    assert found["described"].count("tea_break") == 1  # the support table of tests/unit/arguments reads these


def test_the_page_of_flags_has_a_new_field(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_flags_page.page()
    monkeypatch.setattr(write_flags_page, "PACKAGE", package)
    added = set(write_flags_page.page().splitlines()) - set(before.splitlines())
    assert "| `--tea_break` | number, above 0 | none | `--tea_break 20` |" in added
    assert "* `--tea_break`: Minutes without a step, in which the run drinks tea. Default: none." in added

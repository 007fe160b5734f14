"""README.md and docs/architecture.md against the code: commands and layers.

tests/unit/docs checks the links, paths and line lengths of all pages.
"""

from __future__ import annotations

import re
import tomllib

from swift_megatron_grpo.arguments.refused import NOT_YET
from swift_megatron_grpo.cli.main import COMMANDS
from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "swift_megatron_grpo"
README = (REPOSITORY / "README.md").read_text()
FLAG = re.compile(r"`--(\w+)`")
MAX_WORDS = 1000  # as `wc -w` counts: with tables, code and links
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of the same level or above."""
    level = heading.split()[0]
    text = page.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{2,{len(level)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in `text`, without their heads."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    heads = [i - 1 for i, row in enumerate(cells) if set("".join(row)) <= set("- |")]
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# ---- README.md


def test_flags_that_the_readme_calls_gaps_are_refused() -> None:
    text = section(README, "## Not supported")
    flags = {flag for line in text.splitlines() if line.startswith(("* ", "  ")) for flag in FLAG.findall(line)}
    assert len(flags) >= 6 and flags <= set(NOT_YET)


def test_commands_of_the_readme_exist() -> None:
    commands = re.findall(r"swift-megatron-grpo ([a-z][\w-]*)", README)
    assert commands and set(commands) <= COMMANDS.keys()


def test_scripts_of_the_readme_exist() -> None:
    scripts = re.findall(r"(?:bash )?(scripts/\w+\.\w+)", README)
    assert scripts and all((REPOSITORY / script).is_file() for script in scripts)


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS


def test_the_first_run_lists_every_template() -> None:
    page = (REPOSITORY / "docs" / "first_run_gpu.md").read_text()
    listed = re.findall(r"\(\.\./templates/(\w+\.sh)\) \|", page)
    assert sorted(listed) == sorted(file.name for file in (REPOSITORY / "templates").glob("*.sh"))


# ---- docs/architecture.md


def test_the_code_layout_names_every_folder_and_module_of_the_package() -> None:
    named = {span for row in table_rows(section(ARCHITECTURE, "## Code layout")) for span in code_spans(row[0])}
    folders = {f"{file.parent.name}/" for file in PACKAGE.glob("*/__init__.py")}
    modules = {file.name for file in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert named == folders | modules


def test_the_layers_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers, _ = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert "```\n" + "\n".join(layers) + "\n```" in section(ARCHITECTURE, "## Layers")

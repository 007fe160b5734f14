"""Add files that their folder's `__init__.py` does not list to its docstring, with the first line of their own.

    python scripts/write_file_lists.py

tests/unit/test_style.py requires the lists to be complete. Shorten what this adds: one line for each file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "swift_megatron_grpo"
_ENTRY = re.compile(r"(?P<indent> *)(?P<name>\w+(\.py|/) +)")


def missing(folder: Path) -> list[Path]:
    """Return the modules of a folder that the docstring of its `__init__.py` does not name."""
    listed = _docstring(folder / "__init__.py")
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py" and path.name not in listed]


def with_files(text: str, descriptions: dict[str, str]) -> str:
    """Return the text of an `__init__.py` with more lines after the last one of its list, or of its docstring."""
    lines = text.splitlines(keepends=True)
    entries = {number: entry for number, line in enumerate(lines) if (entry := _ENTRY.match(line))}
    indent = next((entry["indent"] for entry in entries.values()), "")
    width = max((len(entry["name"]) for entry in entries.values()), default=0)
    added = [f"{indent}{(name + ' ').ljust(width)}{first_line}\n" for name, first_line in descriptions.items()]
    if entries:
        after = max(entries) + 1
        lines[after:after] = added
        return "".join(lines)
    summary, rest = text.removeprefix('"""').split('"""', 1)
    return f'"""{summary.rstrip()}\n\n{"".join(added)}"""{rest}'


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


if __name__ == "__main__":
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        if files := missing(folder):
            init = folder / "__init__.py"
            firsts = {path.name: _docstring(path).partition("\n")[0] for path in files}
            init.write_text(with_files(init.read_text(), firsts))

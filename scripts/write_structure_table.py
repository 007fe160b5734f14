"""Write the numbers of the package's structure into docs/architecture.md: its size by folder, and imports between them.

    python scripts/write_structure_table.py

tests/unit/docs/test_generated_pages.py compares them. Sizes may differ by a tenth until the next run of scripts/fix.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median

from scripts.write_flags_page import all_flags

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "swift_megatron_grpo"
PAGE = REPOSITORY / "docs" / "architecture.md"
BEGIN = "<!-- structure, by scripts/write_structure_table.py -->\n"
END = "<!-- end of structure -->\n"
# Around the trainer: a machine without a GPU, tools before and after a run.
AROUND = ("platforms/cpu", "cli", "output/report")

Arrow = tuple[str, str]


@dataclass(frozen=True)
class Size:
    files: int
    lines: int

    @classmethod
    def of(cls, paths: list[Path]) -> Size:
        return cls(len(paths), sum(len(path.read_text().splitlines()) for path in paths))


def modules(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def rooms() -> list[str]:
    """Return the folders and modules at the root of the package."""
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    return sorted(names - {"__init__"})


def sizes() -> dict[str, Size]:
    """Return the size of every folder at the root, of the package, and of the package without AROUND."""
    around = [path for folder in AROUND for path in modules(PACKAGE / folder)]
    of_folders = {f"`{room}/`": Size.of(modules(PACKAGE / room)) for room in rooms() if (PACKAGE / room).is_dir()}
    trainer = Size.of([path for path in modules() if path not in around])
    return {**of_folders, "the package": Size.of(modules()), f"without {', '.join(AROUND)}": trainer}


def arrows() -> set[Arrow]:
    """Return the pairs of rooms of which the first imports the second."""
    found = set[Arrow]()
    for path in modules():
        source, *_ = path.relative_to(PACKAGE).with_suffix("").parts
        for target in set(_imported(path)) & set(rooms()):
            if target != source:
                found.add((source, target))
    return found


def _imported(path: Path) -> Iterator[str]:
    """Yield the first name below the package of each import; none is relative."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}."))


def circles(found: set[Arrow]) -> set[frozenset[str]]:
    """Return the pairs of rooms that import each other, directly or through others."""
    reached = set(found)
    for middle, start, end in product(rooms(), repeat=3):  # Warshall: the middle is the outermost loop
        if (start, middle) in reached and (middle, end) in reached:
            reached.add((start, end))
    return {frozenset(pair) for pair in reached if pair[0] != pair[1] and pair[::-1] in reached}


def climbs(found: set[Arrow]) -> set[Arrow]:
    """Return the arrows that do not lead to a lower layer of the contract in pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [one["layers"] for one in contracts if one.get("containers") == [PACKAGE.name]]
    floor = {room.strip(): number for number, layer in enumerate(layers) for room in layer.split("|")}
    return {(start, end) for start, end in found if floor.get(end, 0) <= floor.get(start, 0)}


def files_by_flag() -> dict[str, int]:
    """Return how many files name each flag, outside of settings/, which describes it, and of tools."""
    texts = [
        frozenset(re.findall(r"\w+", path.read_text()))
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] not in ("settings", "cli")
    ]
    return {flag.name: sum(flag.name in words for words in texts) for flag in all_flags()}


def facts() -> dict[str, float]:
    found, places = arrows(), files_by_flag()
    return {
        "entries at the root of the package": len(rooms()),
        "import arrows between them": len(found),
        "pairs of them that import each other, also through others": len(circles(found)),
        "arrows that do not lead to a lower layer": len(climbs(found)),
        f"files that name a flag, outside of `settings/` and `cli/`: median of {len(places)} flags": median(
            places.values()
        ),
    }


def table(of: dict[str, Size], also: dict[str, float]) -> str:
    lines = ["| folder | files | lines |", "| --- | --- | --- |"]
    lines += [f"| {name} | {size.files} | {size.lines:,} |" for name, size in of.items()]
    lines += ["", "| what | number |", "| --- | --- |", *(f"| {name} | {number:g} |" for name, number in also.items())]
    return "\n".join(lines) + "\n"


def with_table(page: str, text: str) -> str:
    start, rest = page.split(BEGIN)
    return f"{start}{BEGIN}{text}{END}{rest.split(END)[1]}"


def written_sizes(page: str) -> dict[str, Size]:
    """Return the sizes that the page states."""
    rows = re.findall(r"^\| (.+) \| (\d+) \| ([\d,]+) \|$", page.split(BEGIN)[1].split(END)[0], re.MULTILINE)
    return {name: Size(int(files), int(lines.replace(",", ""))) for name, files, lines in rows}


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), table(sizes(), facts())))

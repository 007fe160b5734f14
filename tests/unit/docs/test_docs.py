"""Links, file paths and line lengths of README.md, CONTRIBUTING.md, SECURITY.md and docs/*.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "swift_megatron_grpo"
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")
BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.md"))
RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))
PAGES = (
    *(REPOSITORY / name for name in ROOT_PAGES),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *BENCHMARKS,
    *RESULTS,
)
# By a program, with lines as they come.
GENERATED = {"performance.md", "flags.md", "python_api.md", *(page.name for page in RESULTS)}
MAX_COLUMNS = 120
NOT_IN_THE_REPOSITORY = {"example.py", "run.sh", "tiny.py"}  # files of the reader

_SOURCE = (".py", ".sh", ".md", ".toml", ".lock", ".svg")  # a path that ends in one of these names a tracked file
_URL = re.compile(r"(?:https?|git\+https)://\S+")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"\.?\w[\w.*-]*(?:/[\w.*-]+)*/?")
_MODULE = re.compile(r"python -m ((?:benchmarks|scripts|swift_megatron_grpo|tests)[\w.]*)")


@dataclass(frozen=True)
class Line:
    page: Path
    number: int
    text: str
    is_code: bool  # inside a fenced block, or a fence itself

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.number}"


@cache
def lines() -> list[Line]:
    return list(chain.from_iterable(map(_lines_of, PAGES)))


def _lines_of(page: Path) -> Iterator[Line]:
    in_code = False
    for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        is_fence = text.lstrip().startswith("```")
        yield Line(page, number, text, is_code=in_code or is_fence)
        in_code ^= is_fence


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = (line.text.lstrip("#").strip() for line in _lines_of(page) if line.text.startswith("#"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_link(line: Line, target: str) -> str | None:
    """Return what is wrong with a link, None if its file and its heading exist."""
    path, _, anchor = target.partition("#")
    page = line.page.parent / path if path else line.page
    if not page.exists():
        return f"{line}: the link {target} leads to no file"
    if anchor and anchor not in anchors(page):
        return f"{line}: the link {target} leads to no heading"
    return None


def test_every_relative_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    problems = [
        broken_link(line, target)
        for line in lines()
        if not line.is_code
        for target in _LINK.findall(line.text)
        if "://" not in target and not target.startswith("mailto:")
    ]
    broken = [problem for problem in problems if problem is not None]
    assert not broken, "\n".join(broken)


_OF_A_RUN = re.compile(r"output/(run|v\d|checkpoint-)")  # an --output_dir in an example


@cache
def file_names() -> set[str]:
    folders = (PACKAGE, *(REPOSITORY / name for name in ("benchmarks", "docs", "scripts", "templates", "tests")))
    files = chain(REPOSITORY.iterdir(), *(folder.rglob("*") for folder in folders))
    return {path.name for path in files if path.suffix in _SOURCE}


def exists(path: str) -> bool:
    """Return True if a path, which may contain *, exists from the repository's root or from the package's.

    A folder that holds nothing but bytecode is what a move leaves behind, and does not count.
    """
    found = chain.from_iterable(root.glob(path.rstrip("/")) for root in (REPOSITORY, PACKAGE))
    return any(entry.is_file() or any(_files_in(entry)) for entry in found)


def _files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


@cache
def top_folders() -> set[str]:
    folders = chain(REPOSITORY.iterdir(), PACKAGE.iterdir())
    ignored = {".git", ".venv", "runs", "__pycache__"}
    return {folder.name for folder in folders if folder.is_dir() and folder.name not in ignored}


def is_missing(word: str) -> bool:
    """Return True if a word of inline code is a path in the repository that does not exist.

    A path with folders is one if it begins with a folder of ours or names a source file. A bare file name is one if it
    names a source file; the text around it says where that lies, so it is enough that some file has the name.
    """
    word = re.sub(r"(::\w+|:\d+)+$", "", word.rstrip(".,;:"))
    if not _PATH.fullmatch(word) or word in NOT_IN_THE_REPOSITORY or word.endswith("..."):
        return False
    if "/" in word:
        ours = (word.split("/")[0] in top_folders() and not _OF_A_RUN.match(word)) or word.endswith(_SOURCE)
        return ours and not exists(word)
    return word.endswith(_SOURCE) and not word.startswith(".") and word not in file_names()


def missing_paths(line: Line) -> Iterator[str]:
    # In a block of code, a bare file name may be the reader's own.
    codes = [word for word in line.text.split() if "/" in word] if line.is_code else _CODE.findall(line.text)
    for word in chain.from_iterable(code.split() for code in codes):
        if is_missing(word):
            yield f"{line}: {word} does not exist"
    for module in _MODULE.findall(line.text):
        path = module.rstrip(".").replace(".", "/")
        if not any((REPOSITORY / name).is_file() for name in (f"{path}.py", f"{path}/__main__.py")):
            yield f"{line}: python -m {module}: there is no such module"


def test_every_path_in_backticks_exists() -> None:
    missing = [problem for line in lines() for problem in missing_paths(line)]
    assert not missing, "\n".join(missing)


def test_no_line_of_prose_is_longer_than_120_columns() -> None:
    long = [
        f"{line}: {columns} columns"
        for line in lines()
        if line.page.name not in GENERATED and not line.is_code and not line.text.startswith("|")
        if (columns := len(_URL.sub("", line.text))) > MAX_COLUMNS
    ]
    assert not long, "\n".join(long)

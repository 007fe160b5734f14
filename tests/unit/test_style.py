"""Style that ruff does not check: first words of docstrings, lengths of files and functions, modules at the root."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.write_file_lists import missing, with_files
from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "swift_megatron_grpo"
FOLDERS = ("swift_megatron_grpo", "benchmarks", "scripts", "templates", "tests")
FILES = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
# A docstring that begins with one of these is a fragment; a function's begins with a verb (ruff D401).
FRAGMENTS = {
    "also", "as", "beside", "by", "from", "how", "if", "not", "of", "only", "so", "that", "these", "those",
    "to", "until", "up", "what", "when", "where", "whether", "which", "without",
}  # fmt: skip
LONGEST_FILE, LONGEST_FUNCTION = 500, 80  # lines
LONGEST_TEST_NAME = 70  # characters; the rest of what holds goes into the docstring
MODULES_AT_THE_ROOT = 8

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and its statements; expressions, nine tenths of the nodes, hold none."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


@cache
def definitions(path: Path) -> list[ast.Module | Definition]:
    return [node for node in statements(parsed(path)) if isinstance(node, ast.Module | Definition)]


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_no_docstring_is_a_fragment() -> None:
    fragments = [
        f"{name_of(path)}: {docstring.splitlines()[0]}"
        for path in FILES
        for node in definitions(path)
        if (docstring := ast.get_docstring(node)) and docstring.split()[0].strip(".,:;`'\"").lower() in FRAGMENTS
    ]
    assert not fragments, "\n".join(fragments)


def test_files_and_functions_are_short() -> None:
    long = [
        f"{name_of(path)}: {length} lines"
        for path in FILES
        if (length := len(path.read_text().splitlines())) > LONGEST_FILE
    ]
    long += [
        f"{name_of(path)}: {node.name} has {length} lines"
        for path in FILES
        for node in definitions(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_names_of_tests_are_short() -> None:
    long = [
        f"{name_of(path)}: {node.name} has {len(node.name)} characters"
        for path in FILES
        for node in definitions(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME
    ]
    assert not long, f"at most {LONGEST_TEST_NAME}, the rest goes into the docstring:\n" + "\n".join(long)


def test_the_root_of_the_package_holds_few_modules() -> None:
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(modules) <= MODULES_AT_THE_ROOT, modules


def test_every_folder_describes_its_files() -> None:
    """The docstring of a folder's `__init__.py` names every module of the folder."""
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    unlisted = [f"{name_of(path)} is not listed: run scripts/fix" for folder in folders for path in missing(folder)]
    assert not unlisted, "\n".join(unlisted)


def test_a_file_joins_the_list_of_its_folder() -> None:
    text = '"""The folder.\n\nold.py   the old one\n\nTests: none.\n"""\n'
    added = with_files(text, {"a.py": "First.", "longer.py": "Second."})
    assert added == text.replace("old one\n", "old one\na.py     First.\nlonger.py Second.\n")
    assert with_files('"""The folder."""\n', {"a.py": "First."}) == '"""The folder.\n\na.py First.\n"""\n'


def test_every_import_of_the_package_names_a_module_that_exists() -> None:
    """Mypy does not: it ignores missing imports, because most of upstream is untyped."""
    missing = [
        f"{name_of(path)}: {module}"
        for path in FILES
        for node in statements(parsed(path))
        for module in ([node.module or ""] if isinstance(node, ast.ImportFrom) else
                       [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        if module.split(".")[0] == PACKAGE.name
        and not (REPOSITORY / module.replace(".", "/")).with_suffix(".py").is_file()
        and not (REPOSITORY / module.replace(".", "/") / "__init__.py").is_file()
    ]  # fmt: skip
    assert not missing, "\n".join(missing)

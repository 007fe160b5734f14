"""Every message of docs/troubleshooting.md is one of the package: a text in its source, … for what is filled in."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "swift_megatron_grpo"
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \| ", PAGE, re.MULTILINE)
GAP = "…"


def text_of(node: ast.expr) -> str:
    """Return a literal text with a gap for each value; Python has joined adjacent literals already."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return ""


@cache
def texts() -> frozenset[str]:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    docstrings = {
        id(node.body[0].value)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr))
    return frozenset(text_of(node) for node in nodes if id(node) not in docstrings)


def is_in_source(message: str) -> bool:
    """Return True if a text of the source has all parts of the message, in their order and with values between."""
    parts = message.strip(GAP).split(GAP)
    pattern = re.compile(f".*{GAP}.*".join(map(re.escape, parts)) if len(parts) > 1 else re.escape(parts[0]))
    return any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_source(message: str) -> None:
    assert len(message.replace(GAP, "").split()) >= 3, "too short to find anything"
    assert is_in_source(message)


def test_a_message_that_is_not_in_the_source_is_found() -> None:
    assert not is_in_source("rank … ran out of GPU memory on …")
    assert not is_in_source("ran out of … GPU memory")


def test_every_table_has_its_messages_in_this_form() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and not row.startswith(("| message", "| ---"))]
    assert len(rows) == len(MESSAGES) == len(set(MESSAGES))

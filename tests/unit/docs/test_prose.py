"""English of the pages and of comments: no phrase that reads as translated, and no endless sentence in a page.

A phrase is a regular expression with the words to use in its place. Quoted text and code spans of pages do not count.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")
PAGES = [*(REPOSITORY / name for name in ROOT_PAGES), *sorted((REPOSITORY / "docs").rglob("*.md"))]
GENERATED = {"flags.md", "limitations.md", "python_api.md", "commands.md"}  # from docstrings and help texts
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
MOST_WORDS = 30
PHRASES = {
    r"\ban own\b": "one's own, a separate",
    r"\bgo(?:es)? on\b(?! (?:a|an|the|one|two|every|each)\b)": "continues",
    r"\bin vain\b": "without success",
    r"\banew\b": "again",
    r"(?<!here )\b(?:is|are) no (?!longer|more|less|such|need|worse|\w+er\b)\w": "is not a",
    r"\bbeside\b": "next to, in addition to, with",
    r"(?i)\bof which\b[^.]*\bof which\b": "two sentences",
    r"(?i)\bwhose\b[^.;:]*\bwhose\b": "two sentences",
    r"\b[Pp]ictures?\b": "image",
}
CODE = ("swift_megatron_grpo", "benchmarks", "scripts")

_FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@cache
def paragraphs(page: Path) -> list[str]:
    """Return the paragraphs and items of a page, without code, tables and headings; a code span is one word."""
    text = _CODE.sub("`x`", _COMMENT.sub("", _FENCE.sub("", page.read_text())))
    found, current = [], ""
    for line in [*text.splitlines(), ""]:
        starts = re.match(r" *(?:[*-]|\d+\.) ", line)
        if not line.strip() or starts or line.lstrip().startswith(("|", "#")):
            found.append(current)
            current = ""
        if not line.lstrip().startswith(("|", "#")):
            current += " " + line.strip()
    return [paragraph.strip() for paragraph in found if paragraph.strip()]


def sentences(page: Path) -> Iterator[str]:
    for paragraph in paragraphs(page):
        plain = re.sub(r"\]\([^)]*\)", "]", paragraph)
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9`\[*(\"]|vLLM|ms-swift|mcore|torch|verl)", plain)


def words_of(sentence: str) -> int:
    return len(re.findall(r"[\w`][\w`'.,%/-]*", sentence))


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a file."""
    source = file.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring


def found_in(text: str) -> list[str]:
    """Return the phrases of a text, without those in code spans, each with the words to use."""
    plain = _CODE.sub("", text)
    return [
        f'"{match[0]}": write {better}' for phrase, better in PHRASES.items() for match in re.finditer(phrase, plain)
    ]


def test_phrases_are_found() -> None:
    text = "An answer that is no JSON goes on beside an own server; there is no other, whose `is no X` and whose key."
    assert len(found_in(text)) == 5 and not found_in("There is no server, and it goes on a list.")
    assert words_of("Two `code spans` of 1,024 tokens.") == 6


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_has_no_phrase_that_reads_as_translated(page: Path) -> None:
    problems = [
        f"{problem}: {text[:100]}"
        for text in [*paragraphs(page), *re.findall(r"^(?:#|\|).*", _FENCE.sub("", page.read_text()), re.MULTILINE)]
        for problem in found_in(text)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_no_sentence_of_a_page_is_too_long(page: Path) -> None:
    long = [
        f"{words_of(sentence)} words: {sentence}" for sentence in sentences(page) if words_of(sentence) > MOST_WORDS
    ]
    assert not long, "\n".join(long)


def test_comments_have_no_phrase_that_reads_as_translated() -> None:
    problems = [
        f"{file.relative_to(REPOSITORY)}:{line}: {problem}"
        for folder in CODE
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
        for line, text in comments(file)
        for problem in found_in(text)
    ]
    assert not problems, "\n".join(problems)

"""mkdocs.yml lists every page; scripts/test.sh docs builds the site and checks its links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tests.paths import REPOSITORY

SITE = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
# index.md is README.md, measurements.md is benchmarks/README.md
# recipes/index.md links to the other pages of its folder
ELSEWHERE = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "index.md", "measurements.md", "recipes/index.md"}


def pages(nav: Any) -> Iterator[str]:
    for entry in nav:
        [value] = entry.values()
        if isinstance(value, list):
            yield from pages(value)
        else:
            yield value


def test_the_site_lists_every_page_once() -> None:
    listed = list(pages(SITE["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.name for page in (REPOSITORY / "docs").glob("*.md")} | ELSEWHERE


def test_the_hooks_exist() -> None:
    assert all((REPOSITORY / hook).is_file() for hook in SITE["hooks"])

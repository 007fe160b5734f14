"""The files that GitHub and pre-commit read: they parse, and what they call exists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.paths import REPOSITORY

FILES = [*sorted((REPOSITORY / ".github").rglob("*.yml")), REPOSITORY / ".pre-commit-config.yaml"]


def load(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_parse(file: Any) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_jobs_cover_every_stage_of_the_tests() -> None:
    jobs = load(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    stages = [stage for job in jobs for stage in job["stages"].split()]
    assert stages == ["checks", "unit", "contract", "dist", "e2e"]
    script = (REPOSITORY / "scripts" / "test.sh").read_text()
    unknown = [stage for stage in stages if not re.search(rf"\b{stage}\b", script)]
    assert not unknown, f"scripts/test.sh has no stage {unknown}"


def test_issue_forms_have_what_github_requires() -> None:
    for name in ("bug", "feature"):
        form = load(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form["name"] and form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)


def test_hooks_find_their_tools_on_the_path() -> None:
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    entries = {hook["id"]: hook["entry"].split()[0] for hook in repository["hooks"]}
    assert set(entries.values()) == {"ruff", "mypy", "lint-imports"}
    assert all(hook["language"] == "system" for hook in repository["hooks"])

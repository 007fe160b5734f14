"""The files that GitHub and pre-commit read: they parse, and what they call exists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from swift_megatron_grpo import __version__
from tests.paths import REPOSITORY

PYTHONS = ("3.11", "3.12")
FILES = [*sorted((REPOSITORY / ".github").rglob("*.yml")), REPOSITORY / ".pre-commit-config.yaml"]


def load(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_parse(file: Any) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_jobs_cover_every_stage_of_the_tests() -> None:
    jobs = load(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    stages = {python: [s for j in jobs if j["python"] == python for s in j["stages"].split()] for python in PYTHONS}
    [all_stages] = re.findall(r"^all=\((.*)\)$", (REPOSITORY / "scripts" / "test.sh").read_text(), re.MULTILINE)
    assert stages["3.12"] == all_stages.split()
    run = "run: scripts/test.sh ${{ inputs.choice || '--ci' }} ${{ matrix.stages }}"
    assert run in (REPOSITORY / ".github/workflows/test.yml").read_text()
    assert stages["3.11"] == ["unit", "contract", "dist", "e2e", "core-0.16.1"]  # what pip installs there


def test_every_night_runs_the_tests_that_a_change_leaves_out() -> None:
    called = load(".github/workflows/nightly.yml")["jobs"]["test"]
    assert called == {"uses": "./.github/workflows/test.yml", "with": {"choice": "--all"}}
    script = (REPOSITORY / "scripts" / "test.sh").read_text()
    assert re.findall(r"^ +--(\w+)\) chosen=\((.*)\) every_stage=1", script, re.MULTILINE) == [
        ("all", ""),
        ("ci", "--without-nightly"),
    ]
    assert (REPOSITORY / ".ci" / "run").read_text().endswith('/scripts/test.sh" --ci\n')


def test_every_other_megatron_has_a_folder_and_a_stage() -> None:
    stacks = (REPOSITORY / "requirements" / "stacks.txt").read_text().splitlines()
    stages = {line.replace("megatron-core==", "core-") for line in stacks if not line.startswith("#")}
    script = (REPOSITORY / "scripts" / "test.sh").read_text()
    [every] = re.findall(r"^all=\((.*)\)$", script, re.MULTILINE)
    [accepted] = re.findall(r"^ +(checks \| .*)\) stages\+=", script, re.MULTILINE)
    assert {stage for stage in every.split() if stage.startswith("core-")} == stages
    assert accepted.split(" | ") == every.split()


def test_every_path_of_the_test_script_exists() -> None:
    script = (REPOSITORY / "scripts" / "test.sh").read_text()
    braces = re.findall(r"(tests/\w+/\w+)\{([\w,]+)\}(\.py)", script)
    paths = [f"{start}{name}{end}" for start, names, end in braces for name in names.split(",")]
    paths += re.findall(r"tests/[\w/]+(?:\.\w+)?\b(?!\{)", re.sub(r"\S*\{[\w,]+\}\.py", "", script))
    assert len(paths) > 15 and not [path for path in paths if not (REPOSITORY / path).exists()]


def test_the_first_set_has_the_megatron_that_ran_on_gpus() -> None:
    assert pins("requirements/cpu.lock")["megatron-core"] == pins("requirements/gpu.lock")["megatron-core"]


def test_torchs_cuda_build_is_the_version_of_the_cpu_build() -> None:
    cpu, cuda = pins("requirements/cpu.lock"), pins("requirements/cuda.lock")
    assert cpu["torch"] == cuda["torch"] + "+cpu"
    assert cpu.keys() & cuda.keys() == {"torch", "triton"}  # what it replaces


def pins(path: str) -> dict[str, str]:
    lines = (REPOSITORY / path).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_citation_has_the_version_of_the_package() -> None:
    assert load("CITATION.cff")["version"] == __version__


def test_actions_are_pinned_by_commit_with_their_version() -> None:
    workflows = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    used = [line for file in workflows for line in file.read_text().splitlines() if "uses:" in line]
    assert len(used) > 5
    pinned = r"uses: ([\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml)$"
    assert not [line for line in used if not re.search(pinned, line)]

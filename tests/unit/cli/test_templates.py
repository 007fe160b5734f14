"""Listing and copying templates; tests/contract/test_wheel.py does both from an installed wheel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swift_megatron_grpo.cli import templates
from swift_megatron_grpo.cli.main import main
from tests.paths import REPOSITORY


def test_in_a_clone_the_templates_are_those_of_the_repository() -> None:
    assert templates.templates_folder() == REPOSITORY / "templates"


def test_every_template_states_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list((REPOSITORY / "templates").glob("*.sh")))
    for line in lines:
        name, purpose = line.split(maxsplit=1)
        assert name.endswith(".sh") and len(purpose) > 20


def test_copying_prints_the_new_files_and_overwrites_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "folder"
    assert main(["templates", str(target)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert target / "cpu_quickstart.sh" in printed and target / "plugins" / "letters.py" in printed
    assert all(file.is_file() for file in printed)
    edited = target / "multi_turn.sh"
    edited.write_text("mine")
    assert main(["templates", str(target)]) == 1
    assert "exists; name another folder" in capsys.readouterr().err
    assert edited.read_text() == "mine"


def test_the_purpose_is_the_first_sentence_of_the_comment(tmp_path: Path) -> None:
    script = tmp_path / "some.sh"
    script.write_text("#!/usr/bin/env bash\n# Trains a model\n# on some data. And more.\nset -e\n# not this\n")
    assert templates.purpose(script) == "Trains a model on some data"


def test_verifiers_sh_writes_the_tasks_and_is_agent_sh(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", "megatron"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$VERIFIERS_ENVIRONMENT" "$VERIFIERS_ARGUMENTS" "$@"\n')
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "ENVIRONMENT": "reverse-text", "OUTPUT": str(tmp_path / "out")}
    command = [str(REPOSITORY / "templates" / "verifiers.sh"), "--max_turns", "3"]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    wrote, trained = run.stdout.splitlines()
    plugin = REPOSITORY / "templates" / "plugins" / "verifiers_agent.py"
    assert wrote == f"python reverse-text {{}} {plugin} {tmp_path}/out"
    assert f"--dataset {tmp_path}/out/train.jsonl " in trained and f"--output_dir {tmp_path}/out " in trained
    assert trained.endswith(f"--agent {plugin}:verifiers_agent --max_turns 3")  # the last of a flag counts

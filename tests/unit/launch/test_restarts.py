"""A start after a failure continues what this run has saved, or what its flags name."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.launch.roles import Refused, Roles
from swift_megatron_grpo.launch.start import variables_of_restarts
from swift_megatron_grpo.plugin.command_line import parse_flag
from tests.unit.arguments.test_resume import applied
from tests.unit.launch.test_roles import roles
from tests.unit.output.checkpoints.test_newest import saved


def of_run(folder: Path, more: str = "") -> Roles:
    return roles(f"train: {{gpus: 1}}\noutput_dir: {folder}\nmax_failures: 2\n{more}")


@pytest.mark.parametrize("more", ["", "resume: never"])
def test_a_restart_does_not_continue_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    saved(tmp_path / "v0-20260101-000000", 90, at=50.0)
    run = of_run(tmp_path, more)
    for name, value in variables_of_restarts(run).items():
        monkeypatch.setenv(name, value)
    assert parse_flag(run.resumed().trainer_flags, "resume") == "auto"
    again = applied(tmp_path)
    assert (again.finetune, again.resumed_step) == (True, 0)
    own = saved(tmp_path / "v1-20260102-000000", 10, at=50.5)
    assert applied(tmp_path).mcore_model == str(own)


def test_a_restart_of_a_run_that_continues_another_continues_it(tmp_path: Path) -> None:
    saved(tmp_path, 90, at=50.0)
    assert variables_of_restarts(of_run(tmp_path, "resume: auto")) == {}
    assert variables_of_restarts(roles(f"train: {{gpus: 1}}\noutput_dir: {tmp_path}")) == {}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("no_save_optim: true", "no_save_optim: true saves none to continue from; use no_save_optim: false"),
        ("finetune: false\nmcore_model: a", "leave out finetune, and set resume: auto to continue from output_dir"),
    ],
)
def test_what_would_refuse_a_restart_is_refused_at_the_start(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        of_run(tmp_path, more)
    assert of_run(tmp_path, "no_save_optim: true\nno_load_optim: true\nfinetune: true").max_failures == 2

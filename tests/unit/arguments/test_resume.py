"""--resume sets the flags that a user would type, in the folder of the run that it continues."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.arguments import resume
from swift_megatron_grpo.arguments.command_line import known_flags
from swift_megatron_grpo.arguments.resume import (
    RunFinished,
    apply_resume,
    check_or_fall_back,
    check_same,
    raise_if_finished,
    typed_flags,
)
from swift_megatron_grpo.output.checkpoints.sources import BadCheckpoint, Source
from tests.unit.output.checkpoints.test_newest import saved


def arguments(folder: Path, **flags: Any) -> Any:
    defaults = {
        "resume": "auto", "output_dir": str(folder), "finetune": True, "mcore_model": None, "mcore_adapter": None,
        "add_version": True, "no_load_optim": False, "has_adapter": False, "resumed_step": 0, "train_iters": 9,
        "mtp_num_layers": None,
    }  # fmt: skip
    return SimpleNamespace(**defaults | flags)


def applied(folder: Path, **flags: Any) -> Any:
    args = arguments(folder, **flags)
    apply_resume(args)
    return args


def test_never_and_an_empty_folder_change_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "out", 3, at=1.0)
    for changes in ({"resume": "never"}, {"output_dir": str(tmp_path / "empty")}):
        assert applied(tmp_path / "out", **changes) == arguments(tmp_path / "out", **changes)


@pytest.mark.parametrize("run", ["", "v3-20260101-000000"])
def test_auto_continues_in_the_folder_of_the_run(tmp_path: Path, run: str) -> None:
    folder = saved(tmp_path / run, 3, at=1.0)
    args = applied(tmp_path)
    assert (args.finetune, args.mcore_model, args.mcore_adapter) == (False, str(folder), None)
    assert (args.output_dir, args.add_version, args.resumed_step) == (str(folder.parent), False, 3)


def test_an_adapter_is_loaded_beside_the_base_model_that_the_user_gives(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3, at=1.0, tuner_type="lora")
    args = applied(tmp_path, has_adapter=True, mcore_model="base")
    assert (args.mcore_model, args.mcore_adapter) == ("base", str(folder))


def test_a_checkpoint_of_another_folder_begins_a_run_in_the_output_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "other", 3, at=1.0)
    saved(tmp_path / "out", 5, at=2.0)
    args = applied(tmp_path / "out", resume=str(folder))
    assert (args.mcore_model, args.output_dir, args.add_version) == (str(folder), str(tmp_path / "out"), True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finetune": False, "mcore_model": "x"}, "--resume auto sets --finetune false --mcore_model itself"),
        ({"output_dir": None}, "--resume auto needs --output_dir"),
        ({"has_adapter": True}, "was saved with --tuner_type full, and this run has --tuner_type lora"),
        (
            {"mtp_num_layers": 1},
            "was saved without --mtp_num_layers 1, .*; leave out --mtp_num_layers 1, or train the saved model",
        ),
        ({"resume": "nowhere"}, "--resume nowhere: .*use --resume auto, or a folder checkpoint-N"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path, 3, at=1.0)
    with pytest.raises(ValueError, match=message):
        applied(tmp_path, **changes)


def test_damage_that_only_full_verification_finds_falls_back_with_auto(tmp_path: Path) -> None:
    whole, damaged = saved(tmp_path, 2, at=1.0), saved(tmp_path, 3, at=2.0)
    for value, tried in (("auto", ["checkpoint-3", "checkpoint-2"]), (str(damaged), ["checkpoint-3"])):
        args, seen = applied(tmp_path, resume=value), list[str]()

        def check(sources: Any, args: Any = args, seen: list[str] = seen) -> list[str]:
            seen.append(Path(args.mcore_model).name)
            if seen[-1] == "checkpoint-3":
                raise BadCheckpoint("damaged", Source("resume", whole, megatron=True))
            return ["a warning"]

        args.checkpoint_sources = ()
        if value == "auto":
            assert check_or_fall_back(args, check) == ["a warning"] and args.resumed_step == 2
        else:
            with pytest.raises(BadCheckpoint):
                check_or_fall_back(args, check)
        assert seen == tried


def test_a_run_that_has_done_all_steps_ends_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    saved(tmp_path, 9, at=1.0)
    args = applied(tmp_path)
    args.resumes = True
    with pytest.raises(RunFinished, match=r"checkpoint-9 is the last step of this run, 9 of 9"):
        raise_if_finished(args)
    args.train_iters = 10
    raise_if_finished(args)


def test_ranks_that_see_different_checkpoints_are_refused() -> None:
    check_same("auto", ["a", "a", "a"])
    with pytest.raises(ValueError, match=r"rank 0 out/checkpoint-5, rank 2 none; put --output_dir on a file system"):
        check_same("auto", ["out/checkpoint-5", "out/checkpoint-5", "none"])


def test_flags_without_effect_on_a_rollout_and_secrets_are_not_compared() -> None:
    assert known_flags() > resume._WITHOUT_EFFECT
    names = ("lr", "output_dir", "hub_token", "vllm_server_api_key", "top_p")
    assert typed_flags(make_dataclass("Flags", names)(0.1, "out", "secret", "secret", None)) == (
        ("lr", "0.1"),
        ("top_p", "None"),
    )

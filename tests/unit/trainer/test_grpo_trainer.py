"""Hooks of the trainer that ms-swift calls: what is saved, and when, also if a run ends early. No model is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.megatron.trainers.base import BaseMegatronTrainer

from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.output.checkpoints.manifest import has_manifest, read_manifest
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.stopping.request import StoppedBySignal
from swift_megatron_grpo.trainer import grpo_trainer as module
from swift_megatron_grpo.trainer.grpo_trainer import MegatronGRPOTrainer
from swift_megatron_grpo.trainer.start import next_save
from tests.fakes.runs import FakeRun, fake_run
from tests.unit.output.checkpoints.saved import writer

STEPS = 3


def make(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[MegatronGRPOTrainer, FakeRun]:
    """Return a trainer that has set up its training, without the models and the files of ms-swift."""
    run = fake_run(**settings)
    trainer: Any = object.__new__(MegatronGRPOTrainer)
    trainer.args = SimpleNamespace(
        output_dir=str(folder), train_iters=STEPS, steps_per_rollout=1, save_steps=2, save_total_limit=None,
        no_save_optim=False, save_safetensors=False, async_save=False, resumes=False, resume="never",
        has_adapter=False, mcore_model=None, mcore_adapter=None, adapters=[], seed=1,
    )  # fmt: skip
    trainer.settings = SimpleNamespace(
        batch=SimpleNamespace(generation_batch_size=6, rollout_prompts=3), num_iterations=1,
        recording=SimpleNamespace(rollout_only=False),
    )  # fmt: skip
    trainer.state = SimpleNamespace(
        iteration=0, consumed_train_samples=0, last_model_checkpoint=None, best_model_checkpoint=None, should_log=True,
        should_eval=True, should_save=True,
    )  # fmt: skip
    trainer._start_iteration, trainer._seeds_dropout, trainer._is_set_up, trainer._train_metrics = 0, False, True, {}
    trainer.loop = GRPOLoop(run.config, run.stages, trainer.state, 0, STEPS)
    trainer.checkpoints, trainer.stop, trainer.remote = writer(folder), run.stages.stop, None
    trainer._checkpoint_bytes = lambda: 100.0
    trainer.call_event = lambda event: run.events.append(event)

    def save(self: Any) -> None:
        run.events.append("save")
        path = folder / f"checkpoint-{self.state.iteration}"
        path.mkdir()
        (path / "weights").write_bytes(b"w")
        self.state.last_model_checkpoint = str(path)
        self._rotate_checkpoints(str(folder))

    monkeypatch.setattr(BaseMegatronTrainer, "save_checkpoint", save)
    monkeypatch.setattr(BaseMegatronTrainer, "finalize_training", lambda self: run.events.append("callbacks end"))
    monkeypatch.setattr(module, "end_writers_with_rank", lambda: None)
    monkeypatch.setattr(module, "is_master", lambda: True)
    return trainer, run


def trained(trainer: MegatronGRPOTrainer, steps: int) -> None:
    """Train as ms-swift's loop does."""
    for _ in range(steps):
        trainer.train_step(None)
        trainer.state.iteration += 1
        trainer.state.consumed_train_samples += 6


def raises(error: Exception) -> Callable[..., None]:
    def train(*_: Any) -> None:
        raise error

    return train


def test_a_step_returns_its_metrics_as_tensors_and_the_gradient_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = make(tmp_path, monkeypatch)
    [metrics], grad_norm, updated = trainer.train_step(None)
    assert grad_norm == 1.0 and updated and "grad_norm" not in metrics
    assert all(isinstance(value, torch.Tensor) for value in metrics.values()) and metrics["loss"].item() == 0.0


def test_a_checkpoint_has_a_manifest_with_the_position_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = make(tmp_path, monkeypatch)
    trained(trainer, 2)
    trainer.save_checkpoint()
    manifest = read_manifest(tmp_path / "checkpoint-2")
    assert (manifest.step, manifest.prompts) == (2, 6)  # 3 prompts a rollout, 1 step a rollout


def test_a_checkpoint_within_a_rollout_has_the_rest_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make(tmp_path, monkeypatch, steps_per_generation=2)
    trained(trainer, 1)
    trainer.save_checkpoint()
    assert (tmp_path / "checkpoint-1" / "unfinished_rollout.jsonl").is_file()
    trained(trainer, 1)
    trainer.save_checkpoint()
    assert not (tmp_path / "checkpoint-2" / "unfinished_rollout.jsonl").exists()


def test_a_failure_of_all_ranks_saves_the_last_complete_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trained(trainer, 2)
    run.events.clear()
    monkeypatch.setattr(BaseMegatronTrainer, "train", raises(SharedFailure("a server is lost")))
    with pytest.raises(SharedFailure, match="a server is lost"):
        trainer.train([], None)
    assert run.events == ["models reload", "save"] and has_manifest(tmp_path / "checkpoint-2")


def test_the_last_step_is_logged_whatever_logging_steps_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make(tmp_path, monkeypatch)
    logged = []

    def run_step(self: Any, *_: Any) -> bool:
        trained(self, 1)
        logged.extend([self.state.iteration] if self.state.should_log else [])
        return bool(self.state.iteration < STEPS)

    monkeypatch.setattr(BaseMegatronTrainer, "run_train_step", run_step)
    trainer.state.should_log = False
    while trainer.run_train_step(None, None):
        pass
    assert logged == [STEPS]


def test_steps_before_an_early_end_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trained(trainer, 2)
    trainer._train_metrics = {"loss": torch.tensor([3.0, 2.0])}
    trainer.on_log = lambda logs: run.events.append(f"log {[*logs]}")
    run.events.clear()
    for _ in range(2):
        trainer._end_early()
    assert run.events == ["models reload", "save", "log ['loss']"]


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trained(trainer, 2)
    trainer.save_checkpoint()
    run.events.clear()
    trainer._end_early()
    assert run.events == []


def test_before_the_first_step_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trainer._end_early()
    trainer._is_set_up = False  # the failure comes from set-up: there is no loop
    del trainer.loop, trainer.checkpoints
    trainer._end_early()
    assert run.events == []


def test_another_error_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trained(trainer, 1)
    run.events.clear()
    monkeypatch.setattr(BaseMegatronTrainer, "train", raises(ValueError("on this rank only")))
    with pytest.raises(ValueError, match="on this rank only"):
        trainer.train([], None)
    assert run.events == []


def test_a_signal_ends_the_run_with_a_line_that_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trained(trainer, 1)
    run.events.clear()
    trainer.stop._signal = SIGTERM
    with pytest.raises(StoppedBySignal) as stopped:
        trainer._end_early()
    assert run.events == ["models reload", "save", "callbacks end", "engine ends"]  # the watchdog limits the exit
    folder = tmp_path / "checkpoint-1"
    assert f"stopped by SIGTERM after step 1 of {STEPS}; the checkpoint is {folder}" in stopped.value.line
    assert f"--finetune false --mcore_model {folder}" in stopped.value.line


def test_the_end_of_training_ends_generation_and_then_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    trainer.finalize_training()
    assert run.events == ["callbacks end", "engine ends", "watchdog ends"]


def test_generating_only_counts_the_steps_and_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, run = make(tmp_path, monkeypatch)
    logged: list[dict[str, Any]] = []
    trainer.settings.recording.rollout_only = True  # type: ignore[misc]
    trainer.setup_training = lambda *_: (None, None)  # type: ignore[method-assign]
    trainer._aggregated_metrics = lambda metrics, into: into.update(metrics[0])
    trainer.on_log = lambda logs: logged.append(logs)
    trainer.train([], None)
    assert trainer.state.iteration == STEPS == len(logged) and "train" not in run.events
    assert not list(tmp_path.iterdir()) and run.events[-1] == "watchdog ends"


def saving_three(folder: Path, monkeypatch: pytest.MonkeyPatch, times: Sequence[int]) -> Any:
    """Return a trainer that has saved three steps, at these times by the clock."""
    trainer, _ = make(folder, monkeypatch)
    for step, time in enumerate(times, start=1):
        trainer.state.iteration = step
        trainer.save_checkpoint()
        os.utime(folder / f"checkpoint-{step}", (time, time))
    return trainer


def test_incomplete_checkpoints_are_removed_first_a_loaded_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = saving_three(tmp_path, monkeypatch, times=(1, 2, 3))
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    trainer.args.resumes, trainer.args.mcore_model = True, str(tmp_path / "checkpoint-1")  # type: ignore[misc]
    assert [Path(path).name for path in trainer._sorted_checkpoints(str(tmp_path))] == ["checkpoint-2", "checkpoint-3"]


def test_the_checkpoint_saved_last_is_removed_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = saving_three(tmp_path, monkeypatch, times=(8, 7, 6))
    names = [Path(path).name for path in trainer._sorted_checkpoints(str(tmp_path))]
    assert names == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    assert Path(trainer._sorted_checkpoints(str(tmp_path))[-1]).name == "checkpoint-1"


def test_the_next_checkpoint_is_at_the_next_period_or_at_the_end() -> None:
    args: Any = SimpleNamespace(save_steps=4, train_iters=10)
    assert [next_save(args, step) for step in (0, 3, 4, 8)] == [4, 4, 8, 10]
    assert next_save(SimpleNamespace(save_steps=None, train_iters=10), 3) == 10  # type: ignore[arg-type]

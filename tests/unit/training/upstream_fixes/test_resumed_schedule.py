"""A run that resumes has the learning rates of its own flags, at the place of the checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from packaging.version import Version

from swift_megatron_grpo.platforms.cpu import activate

if not torch.cuda.is_available():
    activate()
from megatron.core import __version__ as megatron_version
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from swift_megatron_grpo.training.upstream_fixes.resumed_schedule import continue_after, settings_of_flags

BATCH = 8
# From 0.19 on the groups of a checkpoint are found by their learning rates, too.
FINDS_BY_RATE = Version(Version(megatron_version).public) >= Version("0.19")
KIND = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def run_of(lr: float, steps: int, batch: int = BATCH, decay: float = 0.1, **settings: Any) -> OptimizerParamScheduler:
    """Return the scheduler of a run, with its optimizer of one group; weight decay grows from 0 to `decay`."""
    inner = torch.optim.Adam(
        [{"params": [torch.nn.Parameter(torch.ones(2))], "max_lr": lr, "min_lr": 0.0, **KIND}], **settings
    )
    optimizer = FP32Optimizer(inner, OptimizerConfig(), lambda *_: None)
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=lr, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=steps * batch,
        lr_decay_style="linear", start_wd=0.0, end_wd=decay, wd_incr_steps=steps * batch, wd_incr_style="linear",
    )  # fmt: skip


def load(scheduler: OptimizerParamScheduler, saved: OptimizerParamScheduler) -> None:
    """Load what another run has saved, as ms-swift does."""
    scheduler.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    scheduler.load_state_dict(saved.state_dict())


def rates(scheduler: OptimizerParamScheduler, steps: int, batch: int = BATCH) -> list[float]:
    found = []
    for _ in range(steps):
        [group] = scheduler.optimizer.param_groups
        found += [group["lr"], group["weight_decay"]]
        scheduler.step(increment=batch)
    return found


def ended(lr: float = 1.0, steps: int = 10, done: int = 10) -> OptimizerParamScheduler:
    saved = run_of(lr, steps)
    saved.step(increment=done * BATCH)
    return saved


def test_upstream_trains_a_longer_run_at_a_rate_of_zero() -> None:
    """This fails once ms-swift overrides the checkpoint's schedule; settings_of_flags can then go."""
    longer = run_of(lr=1.0, steps=20)
    load(longer, ended())
    assert rates(longer, 3)[::2] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("lr", [1.0] if FINDS_BY_RATE else [1.0, 0.5])
@pytest.mark.parametrize("done", [0, 4, 10])
def test_a_resumed_run_has_the_rates_of_a_whole_one(lr: float, done: int) -> None:
    whole, resumed = run_of(lr, 20), run_of(lr, 20, decay=0.1)
    expected = rates(whole, 20)[2 * done :]
    with settings_of_flags(resumed):
        load(resumed, ended(done=done))
    continue_after(resumed, done, BATCH)
    assert rates(resumed, 20 - done) == pytest.approx(expected)
    assert rates(resumed, 1)[0] == 0.0


@pytest.mark.skipif(not FINDS_BY_RATE, reason="groups are found by other settings")
def test_upstream_refuses_another_rate() -> None:
    """This fails once it is accepted; docs/checkpoints.md says so."""
    resumed = run_of(0.5, 20)
    with pytest.raises(ValueError, match="Could not find parameter group"), settings_of_flags(resumed):
        load(resumed, ended())


def test_another_batch_size_does_not_move_the_place() -> None:
    resumed = run_of(1.0, 10, batch=2 * BATCH)
    with settings_of_flags(resumed):
        load(resumed, ended(done=4))
    continue_after(resumed, 4, 2 * BATCH)
    assert rates(resumed, 6, 2 * BATCH)[::2] == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_other_settings_of_the_optimizer_are_those_of_flags_too() -> None:
    saved, resumed = ended(), run_of(1.0, 20, betas=(0.9, 0.95), eps=1e-6)
    saved.optimizer.param_groups[0]["step"] = 10
    with settings_of_flags(resumed):
        load(resumed, saved)
    [group] = resumed.optimizer.param_groups
    assert (group["betas"], group["eps"], group["step"]) == ((0.9, 0.95), 1e-6, 10)

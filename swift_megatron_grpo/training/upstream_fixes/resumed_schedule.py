"""A run that resumes has the schedule of its own flags; Megatron takes that of the checkpoint.

* The scheduler takes the checkpoint's --lr, --min_lr, warm-up, decay and weight decay (its switch to override them is
  set by no flag of ms-swift). A run of 100 steps that is continued with --train_iters 200 then trains 100 steps at the
  learning rate at which the first 100 ended: at 0, so that no weight changes. A lower --lr is ignored.
* Groups of parameters take learning rates and Adam's settings from the checkpoint's group of the same kind. Learning
  rates do not tell kinds apart, so a group with --vit_lr may get the rate of another one.
* The place in the schedule is a number of completions, and the schedule a number of iterations. With another
  --global_batch_size the schedule ends too early or not at all.

Tests: tests/unit/training/upstream_fixes/test_resumed_schedule.py, tests/e2e/test_resume.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_OF_TRAINING = {"params", "step", "lr", "weight_decay"}  # the scheduler sets the last two from the others


@contextmanager
def settings_of_flags(scheduler: OptimizerParamScheduler) -> Iterator[None]:
    """Load a checkpoint within this context: what flags set stays as it is."""
    scheduler.use_checkpoint_opt_param_scheduler, scheduler.override_opt_param_scheduler = False, True
    typed = [
        {name: value for name, value in group.items() if name not in _OF_TRAINING}
        for group in scheduler.optimizer.param_groups
    ]
    yield
    for group, of_flags in zip(scheduler.optimizer.param_groups, typed, strict=True):
        group.update(of_flags)
    scheduler.step(increment=0)


def continue_after(scheduler: OptimizerParamScheduler, iterations: int, completions: int) -> None:
    """Set the place of a run that has done so many iterations, by its --global_batch_size."""
    scheduler.num_steps = 0
    scheduler.step(increment=iterations * completions)

"""An external plugin that signals its own rank, as a cluster or a user would: STOP="step 2, rank 1, generation".

Phases: `generation` and `train` of that step, `append` after the first groups of a rollout are in the dump, and
`reward` for the reward function `judges`, which then never returns. SIGNAL is the signal's name, by default SIGTERM.
With AGAIN=1 a second signal follows after 1.5 s. Generation is slow from that step on.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from swift.rewards import ORM, orms

from swift_megatron_grpo.generation.local import engine
from swift_megatron_grpo.generation.local.engine import GiveUp
from swift_megatron_grpo.output.recording.folder import RolloutDump
from swift_megatron_grpo.training.engine import MegatronEngine

_matched = re.fullmatch(r"step (\d+), rank (\d+), (\w+)", os.environ["STOP"])
assert _matched is not None
STEP, RANK, PHASE = int(_matched[1]), int(_matched[2]), _matched[3]
SIGNAL = signal.Signals[os.environ.get("SIGNAL", "SIGTERM")]
steps_done = 0


def signal_rank(phase: str) -> None:
    if phase != PHASE or steps_done + 1 < STEP or torch.distributed.get_rank() != RANK:
        return
    os.environ["STOP"] = "sent"
    os.kill(os.getpid(), SIGNAL)
    if "AGAIN" in os.environ:
        again = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()


def before(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if os.environ["STOP"] != "sent":
            signal_rank(phase)
        return function(*args, **kwargs)

    return called


def append_and_signal(self: RolloutDump, *args: Any) -> None:
    append(self, *args)
    if os.environ["STOP"] != "sent":
        signal_rank("append")


def count_steps(self: MegatronEngine, *args: Any, **kwargs: Any) -> Any:
    global steps_done
    result = train_step(self, *args, **kwargs)
    steps_done += 1
    return result


def check_slowly(self: GiveUp) -> None:
    if steps_done + 1 >= STEP and PHASE == "generation":
        time.sleep(0.15)
    check(self)


class Judges(ORM):
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        signal_rank("reward")
        while os.environ["STOP"] == "sent":
            time.sleep(1)
        return [float(len(text)) for text in completions]


train_step, check, append = MegatronEngine.train_step, GiveUp.check, RolloutDump.append
RolloutDump.append = append_and_signal  # type: ignore[method-assign]
MegatronEngine.train_step = before("train", count_steps)  # type: ignore[method-assign]
GiveUp.check = check_slowly  # type: ignore[method-assign]
engine.sample = before("generation", engine.sample)
orms["judges"] = Judges

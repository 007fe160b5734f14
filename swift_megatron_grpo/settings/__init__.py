"""The flags of every stage, each described once: its type, range, help and rules stand in the class of its stage.

flag.py          describe a flag, and the one function that checks all of them
facts.py         facts that rules may know beyond the flags
algorithm.py     loss, advantages, KL, entropy, dynamic sampling
batches.py       batch sizes and micro batches (batch_plan.py, batch_sizes.py: their arithmetic and suggestions)
sampling.py      sampling in training and in evaluation, lengths
servers.py       vLLM here or behind servers
asynchronous.py  generation ahead of training
recording.py     rollouts on disk
routing.py       router replay
time_limits.py   time limits, traced steps
optimizer.py     learning rate, weight decay, optimizer
training.py      duration, data, what is trained

To add a flag, add a field to the class of the stage that reads it. Nothing else lists it.
"""

from __future__ import annotations

from swift_megatron_grpo.settings.algorithm import Algorithm
from swift_megatron_grpo.settings.asynchronous import Asynchronous
from swift_megatron_grpo.settings.batches import Batches, MicroBatches
from swift_megatron_grpo.settings.flag import Flags, Range, ranges
from swift_megatron_grpo.settings.optimizer import LearningRate, Optimizer
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.routing import Routing
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling
from swift_megatron_grpo.settings.servers import Engine, Servers
from swift_megatron_grpo.settings.time_limits import TimeLimits, Trace
from swift_megatron_grpo.settings.training import Data, Duration, Model

GROUPS: tuple[type[Flags], ...] = (
    Batches, MicroBatches, Sampling, Evaluation, Servers, Engine, Asynchronous, Recording, Routing, TimeLimits, Trace,
    Algorithm, LearningRate, Optimizer, Duration, Data, Model,
)  # fmt: skip

RANGES: dict[str, Range] = {name: valid for group in GROUPS for name, (valid, _) in ranges(group).items()}

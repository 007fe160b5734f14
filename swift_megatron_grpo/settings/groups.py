"""All classes of flags, and the range of every flag."""

from __future__ import annotations

from swift_megatron_grpo.settings.algorithm import Algorithm
from swift_megatron_grpo.settings.asynchronous import Asynchronous
from swift_megatron_grpo.settings.batches import Batches, MicroBatches
from swift_megatron_grpo.settings.flag import Flags, Range, ranges
from swift_megatron_grpo.settings.optimizer import LearningRate, Optimizer
from swift_megatron_grpo.settings.parallel import Parallel, ReferenceSizes
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.routing import Routing
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling
from swift_megatron_grpo.settings.servers import Engine, Servers
from swift_megatron_grpo.settings.time_limits import TimeLimits, Trace
from swift_megatron_grpo.settings.training import Data, Duration, Model

GROUPS: tuple[type[Flags], ...] = (
    Parallel, ReferenceSizes, Batches, MicroBatches, Sampling, Evaluation, Servers, Engine, Asynchronous, Recording,
    Routing, TimeLimits, Trace,
    Algorithm, LearningRate, Optimizer, Duration, Data, Model,
)  # fmt: skip

RANGES: dict[str, Range] = {name: valid for group in GROUPS for name, (valid, _) in ranges(group).items()}

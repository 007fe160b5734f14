"""All classes of flags, and the range of every flag."""

from __future__ import annotations

from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.algorithm import Algorithm
from swift_megatron_grpo.settings.asynchronous import Asynchronous
from swift_megatron_grpo.settings.batches import Batches, MicroBatches
from swift_megatron_grpo.settings.flag import Flags, Range, ranges
from swift_megatron_grpo.settings.images import Images
from swift_megatron_grpo.settings.losses import Correction, Fipo, Kl, LossConfig, Sapo
from swift_megatron_grpo.settings.optimizer import LearningRate, Optimizer
from swift_megatron_grpo.settings.parallel import Parallel
from swift_megatron_grpo.settings.positions import Positions
from swift_megatron_grpo.settings.recording import CompletionLogging, Recording
from swift_megatron_grpo.settings.reference import Reference
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.routing import Routing
from swift_megatron_grpo.settings.run import Check, Checkpoints, Data, Duration
from swift_megatron_grpo.settings.sampling import Evaluation, Sampling
from swift_megatron_grpo.settings.servers import ApiKey, Engine, Servers
from swift_megatron_grpo.settings.time_limits import TimeLimits, Trace
from swift_megatron_grpo.settings.trained import Kernels, Offloading, Trained

GROUPS: tuple[type[Flags], ...] = (
    Parallel, Batches, MicroBatches, Kernels, Trained, Offloading, Adapter, Reference, Sampling, Evaluation, Servers,
    Engine, Asynchronous, Rewards, Images, Recording, CompletionLogging, Routing, Positions, TimeLimits, Trace,
    Algorithm, LossConfig, Sapo, Fipo, Correction, Kl, LearningRate, Optimizer, Duration, Checkpoints, Data, Check,
    ApiKey,
)  # fmt: skip

RANGES: dict[str, Range] = {name: valid for group in GROUPS for name, (valid, _) in ranges(group).items()}

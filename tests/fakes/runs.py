"""The configuration and the stages of a run on one rank, with a policy of one parameter and a fake engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.grading.rewards import RewardFunctions
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.trace import Trace
from swift_megatron_grpo.output.recording.folder import RolloutDump, Settings
from swift_megatron_grpo.output.recording.reading import EarlierRollouts
from swift_megatron_grpo.output.recording.rows import Limits
from swift_megatron_grpo.packing.routing import ExpertLayers
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.algorithm import ESTIMATORS
from swift_megatron_grpo.settings.chord import Chord
from swift_megatron_grpo.settings.config import (
    EvaluationConfig,
    GradingConfig,
    GRPOConfig,
    SamplingConfig,
)
from swift_megatron_grpo.settings.losses import Kl, LossConfig
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.routing import RouterReplay, Routing
from swift_megatron_grpo.types import ExpertRows, Graded, Sample, TokenValues
from tests.fakes.generation import Engine
from tests.fakes.ranks import OneRank

GROUP, PROMPTS = 2, 3  # completions of a prompt, prompts of a rollout
SAMPLING = SamplingConfig(1.0, 1.0, -1, 1.0, 4, ())
EVALUATION = EvaluationConfig(
    SamplingConfig(0.6, 0.9, -1, 1.0, 8, (), seed=5), num_generations=4, prompts_at_once=2, most_prompts=None,
    before_training=False, correct_reward=0, correct_from=1.0, names={},
)  # fmt: skip
ROWS = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(8)]
DUMPED = Settings(GROUP, GROUP * PROMPTS, 1.0, ("length",))
STEP = 0.5  # that an update adds to the policy's parameter, which is the log-prob of every token


@dataclass
class Policy:
    """Stands in for MegatronEngine: the log-prob of every token is one parameter, which a step changes."""

    events: list[str]
    parameter: torch.Tensor = field(default_factory=lambda: torch.tensor(-2.0))
    trained: list[list[Sample]] = field(default_factory=list)  # by step, as they were at its start
    losses: list[Any] = field(default_factory=list)
    kl: float | None = None  # that a step reports
    parallel = None  # the place of this rank
    flops_of_last_step = 2e12
    passes = SimpleNamespace(expert_layers=ExpertLayers(1, (0,), 4, 2))

    def infer(
        self, samples: Sequence[Sample], outputs: Sequence[str] = ("logprob",), temperature: float | None = None
    ) -> dict[int, TokenValues]:
        self.events.append("infer" if temperature is None else f"infer at {temperature}")
        return {index: self._values(sample) for index, sample in enumerate(samples)}

    def infer_and_record(self, samples: Sequence[Sample]) -> tuple[dict[int, TokenValues], dict[int, ExpertRows]]:
        self.events.append("infer and record")
        experts = {index: np.full((len(sample.tokens), 1, 2), 1) for index, sample in enumerate(samples)}
        return {index: self._values(sample) for index, sample in enumerate(samples)}, experts

    def _values(self, sample: Sample) -> TokenValues:
        sampled = sum(sample.completion_mask)
        return TokenValues(self.parameter.repeat(sampled).tolist(), [float(sample.group)] * sampled)

    def train_step(self, samples: Sequence[Sample], loss: Any, outputs: Sequence[str]) -> dict[str, float]:
        self.events.append("train")
        self.losses.append(loss)
        self.trained.append([deepcopy(sample) for sample in samples])
        self.parameter += STEP
        return {"loss": 0.0, "grad_norm": 1.0, **({} if self.kl is None else {"kl": self.kl})}


@dataclass
class Reference:
    """A frozen policy with a constant log-prob."""

    events: list[str]
    name: str = "reference"
    logprob: float = -3.0

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        self.events.append(self.name)
        lengths = [sum(sample.completion_mask) for sample in samples]
        return {index: TokenValues([self.logprob] * length, None) for index, length in enumerate(lengths)}


@dataclass
class Residency:
    events: list[str]

    def for_inference(self) -> None:
        self.events.append("policy reloads")

    def for_reference(self) -> None: ...

    def for_teacher(self) -> None: ...

    def for_training(self) -> None: ...

    def restore(self) -> None:
        self.events.append("models reload")


@dataclass
class FakeRun:
    """The parts of a run, and the events in it."""

    config: GRPOConfig
    stages: Stages
    engine: Engine
    policy: Policy
    events: list[str]
    logged: list[Graded]


def kl_of(in_reward: bool = False, target: float | None = None, horizon: int = 10000) -> Kl:
    return Kl(kl_in_reward=in_reward, kl_target=target, kl_horizon=horizon, beta=0.1)


def routing_of(replay: RouterReplay = "disabled", compared: int = 0) -> Routing:
    return Routing(
        router_replay_mode=replay,
        router_agreement_samples=compared,
        moe_router_load_balancing_type=None,
        model=None,
    )


def fake_run(
    steps_per_generation: int = 1,
    num_iterations: int = 1,
    max_staleness: int = 0,
    max_resample: int = 0,
    dump: Path | None = None,
    rollouts_done: int = 0,
    loss: LossConfig | None = None,
    kl: Kl | None = None,
    routing: Routing | None = None,
    rounding: float | None = None,
    top_entropy_quantile: float = 1.0,
    dropped: int = 0,
    in_flight: bool = False,
    teacher: float | None = None,
    spare_groups: int | None = 0,
    chord: Chord = Chord(),  # noqa: B008, frozen
    estimator: str = "grpo",
    predicts_drafts: bool = False,
) -> FakeRun:
    """Create a run of rollouts of 3 prompts with 2 completions; with a `dump`, it continues what is in the folder.

    The text of a completion is the id of its prompt, and its reward the length of its text; that of the first `dropped`
    completions is NaN, with --bad_reward drop. `teacher`: its log-prob of every token.
    """
    events: list[str] = []
    logged: list[Graded] = []
    engine = Engine(events=events, rounding=rounding, in_flight=in_flight)
    policy = Policy(events)
    loss = loss or LossConfig(loss_type="grpo", epsilon=0.2, epsilon_high=0.2, beta=0.0)
    size = GROUP * PROMPTS
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(
            rollout_prompts=PROMPTS, num_generations=GROUP, generation_batch_size=size,
            steps_per_generation=steps_per_generation, global_batch_size=size // steps_per_generation,
        ),
        num_iterations=num_iterations, max_staleness=max_staleness, top_entropy_quantile=top_entropy_quantile,
        in_flight_weight_updates=in_flight, engine=SimpleNamespace(predicts_drafts=predicts_drafts, drafts=0),
        grading=GradingConfig(
            num_generations=GROUP, reward_names=("length",), reward_weights=(1.0,),
            advantage_estimator=estimator, scale_rewards=ESTIMATORS[estimator].scale_rewards,
            bad_reward="drop" if dropped else "stop", max_resample_times=max_resample,
            spare_groups=spare_groups,
        ),
        deadlines=SimpleNamespace(reward_timeout=None), sampling=SAMPLING, evaluation=EVALUATION,
        routing=routing or routing_of(), recording=Recording(rollout_dump=dump and str(dump), resume="auto"),
        teacher=SimpleNamespace(name=None if teacher is None else "teacher", tag_column=None), typed=(), vocabulary=99,
        loss=loss, kl=kl or kl_of(), rollout_logprobs_interval=2, chord=chord,
    )  # fmt: skip

    def length(completions: list[str], **columns: Any) -> list[float]:
        graded = GROUP * events.count("grade")
        events.append("grade")
        return [math.nan if graded + i < dropped else float(len(text)) for i, text in enumerate(completions)]

    ranks: Any = OneRank()
    parts: Any = SimpleNamespace(
        prompts=PromptSource(ROWS, seed=1, shuffle=True, taken=rollouts_done * PROMPTS),
        spare_prompts=PromptSource(ROWS, 2, True, label="spare-"),
        answers=None,
        image_reader=None, generation=engine, drafts=None, sync=engine, coordinator=ranks, bodies=None,
        replay=None, training=policy,
        rewards=RewardFunctions(["length"], [length]),
        reference=Reference(events) if loss.beta else None,
        moving_reference=None,
        teacher=None if teacher is None else Reference(events, "teacher", teacher), residency=Residency(events),
        teacher_prompts=None,
        logprob_check=SimpleNamespace(check=lambda samples, rounding: events.append("compare log-probs")),
        router_agreement=None, log=SimpleNamespace(append=logged.extend),
        dump=dump and RolloutDump(dump, DUMPED, 0, writes_here=True, keeps_later=True),
        earlier=dump and EarlierRollouts(dump, Limits(99, 1)),
        watchdog=SimpleNamespace(
            limit=lambda *_: nullcontext(), phase=lambda _: nullcontext(), close=lambda: events.append("watchdog ends")
        ),
        trace=Trace(None, Path(), ranks, list), stop=StopRequest(ranks, grace=120.0),
    )  # fmt: skip
    return FakeRun(config, Stages(**vars(parts)), engine, policy, events, logged)

"""The newest weights to the engine, and the proof that it runs them: nothing is generated without."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from swift_megatron_grpo.config import SyncCheckConfig
from swift_megatron_grpo.generation.interface import GenerationEngine
from swift_megatron_grpo.loop.canary import Canary
from swift_megatron_grpo.loop.phase_timer import PhaseTimer
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.protocol.held_weights import WorkerWeights
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.weights.export import WeightExport
from swift_megatron_grpo.weights.verify import (
    BOUNDS,
    Difference,
    Manifest,
    Problem,
    TensorSpec,
    changed_specs,
    compare_with_sent,
    describe,
)

_NO_TENSOR_DIFFERS = (
    "What the engine holds is what was exported, tensor by tensor. So the export itself is wrong, or the engine "
    "computes something else with it: compare a saved checkpoint in plain transformers with both. If this is how far "
    "apart the two are at their best, for example in a low precision, train on with --sync_check off."
)


class EngineHasOtherWeights(RuntimeError):
    """The engine does not run the trainer's weights, not even after they were sent again."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One transfer, and what every rank found."""

    manifest: Manifest | None  # None: nothing was sent, because what lacked weights has gone
    problems: list[Problem]
    unreadable: set[str]
    difference: Difference


class WeightSync:
    def __init__(
        self,
        config: SyncCheckConfig,
        engine: GenerationEngine,
        residency: Residency,
        export: WeightExport,
        canary: Canary,
        coordinator: Coordinator,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._engine = engine
        self._residency = residency
        self.export = export
        self.canary = canary
        self._coordinator = coordinator
        self._log = log
        self._reads_back = config.mode != "off" and export.adapter is None  # tensors; an adapter's are scaled and fused
        self._specs: dict[str, TensorSpec] | None = None  # of the last sync that was good
        self._usual: float | None = None  # the largest mean difference after a sync that was good

    @property
    def rounding(self) -> float | None:
        """How far log-probs of the same weights are apart on average; None: nothing is checked."""
        floor = BOUNDS[self._config.dtype].floor
        return None if self._config.mode == "off" else max(floor, self._usual or 0.0)

    def to_engine(self, version: int, timer: PhaseTimer) -> dict[str, float]:
        """Leaves the engine awake, with the weights of this version."""
        if not self._any_lacks(version):
            self._wake_weights(timer)
            self._wake_cache(timer)
            return {}
        return self._sync(version, timer, asleep=True)

    def resend(self, version: int, timer: PhaseTimer) -> None:
        """To every part that needs them of an engine that is awake and generating: a server that was started anew."""
        if self._any_lacks(version):
            found = self._sync(version, timer, asleep=False)
            checked = f", checked: {found}" if found else ""
            self._log.warning(f"weights {version} were sent again to what lacked them{checked}")

    def _sync(self, version: int, timer: PhaseTimer, asleep: bool) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._config.mode == "off":
            if asleep:
                self._wake_weights(timer)
            self._load(version, timer, full=False)
            if asleep:
                self._wake_cache(timer)
        else:
            full = self._config.mode == "full" or self._specs is None
            first = self._attempt(version, timer, asleep, full)
            metrics = self._repeat(first, version, timer, asleep) if first.problems else self._accept(first)
        self._engine.mark_verified()
        return metrics

    def _wake_weights(self, timer: PhaseTimer) -> None:
        with timer("phase_switch"):
            self._residency.make_room(self._engine.memory_to_wake)
            self._engine.wake_weights()

    def _wake_cache(self, timer: PhaseTimer) -> None:
        with timer("phase_switch"):
            self._residency.for_generation()
            self._engine.wake_cache()

    def _any_lacks(self, version: int) -> bool:
        """Exporting takes all ranks, so all of them learn that an engine needs these weights."""
        return any(
            self._coordinator.all_gather_or_raise(lambda: self._engine.needs_weights(version), "reaching the engines")
        )

    def _load(self, version: int, timer: PhaseTimer, full: bool) -> tuple[Manifest | None, bool]:
        """Send until no engine needs them: a server may go while it receives, and another one come. Returns what was
        sent, and whether checksums were collected: as asked, and always where an engine is new."""
        manifest = None
        with timer("weight_sync"):
            while self._any_lacks(version):
                full = self._reads_back and (full or any(self._coordinator.all_gather(self._engine.is_new)))
                manifest = Manifest(self._config.dtype if full else None)
                self._residency.for_weight_sync()
                self._engine.load_weights(
                    manifest.watch(self.export()), version, self.export.adapter, collect_checksums=full
                )
        return manifest, full

    def _attempt(self, version: int, timer: PhaseTimer, asleep: bool, full: bool) -> _Attempt:
        """Until an engine has answered: all servers may be lost while they are asked, and come back."""
        while True:
            attempt = self._attempt_once(version, timer, asleep, full)
            if attempt is not None:
                return attempt
            self._log.warning(f"every server that had weights {version} was lost before they were checked; once more")
            full = True  # what comes next is new

    def _attempt_once(self, version: int, timer: PhaseTimer, asleep: bool, full: bool) -> _Attempt | None:
        if asleep:
            self._wake_weights(timer)
        manifest, full = self._load(version, timer, full)
        with timer("sync_check"):
            expected = self.canary.logprobs()  # now, while the policy is on the GPU
        if asleep:
            self._wake_cache(timer)
        with timer("sync_check"):
            problems, unreadable = list[Problem](), set[str]()
            if manifest is not None:
                problems += self._faults_of_export(manifest)
            if manifest is not None and full:
                found, unreadable = self._faults_of_tensors(manifest, self._held_weights())
                problems += found
            apart = self._differences(expected)
        if not apart:
            return None
        difference, found = self._faults_of_numbers(apart)
        return _Attempt(manifest, problems + found, unreadable, difference)

    def _repeat(self, first: _Attempt, version: int, timer: PhaseTimer, asleep: bool) -> dict[str, float]:
        # of the sync that failed: what is sent once more says what it should have been
        held = self._held_weights() if self._reads_back else []
        self._engine.invalidate_weights()
        if asleep:
            self._engine.sleep()
        second = self._attempt(version, timer, asleep, full=True)
        in_first = list[Problem]()
        if self._reads_back and second.manifest is not None:
            in_first, _ = self._faults_of_tensors(second.manifest, held)
        story = f"The first time:\n{describe([*first.problems, *in_first])}"
        if not second.problems:
            self._log.warning(f"weight sync {version} failed its check, was repeated, and is good now. {story}")
            return self._accept(second)
        self._engine.invalidate_weights()
        why = f"\n{_NO_TENSOR_DIFFERS}" if all(each.numbers_only for each in second.problems) else ""
        raise EngineHasOtherWeights(
            f"weight sync {version} failed its check twice: the engine does not run the trainer's weights, and nothing "
            f"was generated. {story}\nThe second time:\n{describe(second.problems)}{why}"
        )

    def _accept(self, attempt: _Attempt) -> dict[str, float]:
        difference = attempt.difference
        if attempt.manifest is not None:
            if self._specs is None:
                self._log.info(self._first_check(attempt.manifest, attempt))
            self._specs = attempt.manifest.specs
        self._usual = max(difference.mean, self._usual or 0.0)
        return {"sync_check/mean_diff": difference.mean, "sync_check/max_diff": difference.max}

    def _first_check(self, manifest: Manifest, attempt: _Attempt) -> str:
        found, difference = len(manifest.specs), attempt.difference
        repacked = f", but {len(attempt.unreadable)} that vLLM has repacked" if attempt.unreadable else ""
        holds = f"holds all {found} tensors bit by bit as they were sent{repacked}"
        bound = f"runs the adapter of {found} tensors"
        return (
            f"first weight sync: vLLM {holds if self._reads_back else bound}; its log-probs of a fixed text of "
            f"{len(self.canary.tokens)} tokens are {difference.mean:.2g} from the trainer's on average, at most "
            f"{difference.max:.2g}"
        )

    # ---- what may be wrong. All ranks together, with the same result on each

    def _faults_of_export(self, manifest: Manifest) -> list[Problem]:
        problems = changed_specs(self._specs, manifest.specs) if self._specs is not None else []
        adapted, merged = self.export.adapted, self.export.take_merged()
        if merged != adapted and self.export.adapter is None:
            lost = f"{adapted - merged} of {adapted} adapters were not merged into what was sent"
            problems.append(Problem(f"rank {self._coordinator.rank}", lost))
        told = self._coordinator.all_gather((problems, adapted))
        found = list(chain.from_iterable(part for part, _ in told))
        if self._config.has_adapter and not any(count for _, count in told):
            found.append(Problem("trainer", "the run has an adapter, and it is bound to no module (--target_modules)"))
        return found

    def _held_weights(self) -> list[WorkerWeights]:
        """Of the engines that this rank asks, from all their workers."""
        answers = self._coordinator.all_gather_or_raise(self._engine.held_weights, "reading weights back")
        engines = {each.engine for each in answers[self._coordinator.rank]}
        return [each for told in answers for each in told if each.engine in engines]

    def _faults_of_tensors(
        self, manifest: Manifest, held_weights: Iterable[WorkerWeights]
    ) -> tuple[list[Problem], set[str]]:
        told = self._coordinator.all_gather(compare_with_sent(manifest.specs, manifest.checksums(), list(held_weights)))
        problems = list(chain.from_iterable(part for part, _ in told))
        return problems, set().union(*(part for _, part in told))

    def _differences(self, expected: Sequence[Sequence[float]]) -> dict[str, Difference]:
        """Of every engine from any data-parallel rank."""
        answers = self._coordinator.all_gather_or_raise(
            lambda: self._engine.score_text(self.canary.tokens), "asking the engines about a fixed text"
        )
        return {
            engine: Difference.largest(Difference.of(told, mine) for mine in expected)
            for answer in answers
            for engine, told in answer.items()
        }

    def _faults_of_numbers(self, apart: dict[str, Difference]) -> tuple[Difference, list[Problem]]:
        bound = BOUNDS[self._config.dtype]
        beyond = {engine: each for engine, each in apart.items() if bound.exceeded(each, self._usual)}
        verdict = bound.exceeded(Difference.largest(beyond.values()), self._usual) or ""
        problems = [Problem(engine, verdict, numbers_only=True) for engine in beyond]
        return Difference.largest(apart.values()), problems

"""Sending of the newest weights to the engine, and the check that it runs them, before anything is generated."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from swift_megatron_grpo.generation.interface import GenerationEngine
from swift_megatron_grpo.loop.checks.canary import Canary
from swift_megatron_grpo.loop.step_context import PhaseTimer
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.weights import verify
from swift_megatron_grpo.weights.export.export import WeightExport
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights

# Equal checksums of all tensors prove the transfer. Export and arithmetic are the same code in every sync, and
# log-probs, which take two forward passes, need not be scored in each.
_SCORED_FIRST, _SCORED_EVERY = 3, 16


class EngineHasOtherWeights(RuntimeError):
    """The engine does not run the trainer's weights, even after they were resent."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One transfer and the result of its check, the same on every rank."""

    manifest: verify.Manifest | None  # None: nothing was sent, because the servers that needed weights are lost
    problems: list[verify.Problem]
    unreadable: set[str] | None  # tensors that cannot be compared; None: no tensors were compared
    difference: verify.Difference | None  # of log-probs; None: they were not scored


class WeightSync:
    """Sends weights to the engine and verifies them. Every rank calls every method."""

    def __init__(
        self,
        config: Adapter,
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
        quantized = config.rollout_quantization != "none"
        self._bound = verify.bound_of(config.torch_dtype, quantized, torch.cuda.is_available())
        # an adapter's tensors are scaled and fused
        self._reads_back = config.sync_check != "off" and export.adapter is None
        self._specs: dict[str, verify.TensorSpec] | None = None  # of the last sync that passed
        self._usual: float | None = None  # the largest mean difference of the syncs that passed
        self._compares_all = True  # in every sync: all tensors can be compared, as far as is known
        self._passed = 0  # syncs since the last one that failed or had a new engine

    @property
    def rounding(self) -> float | None:
        """Mean absolute difference between log-probs of the same weights; None: nothing is checked."""
        return None if self._config.sync_check == "off" else max(self._bound.floor, self._usual or 0.0)

    def to_engine(self, version: int, timer: PhaseTimer) -> dict[str, float]:
        """Wake the engine and send it the weights of this version if needed. Return the metrics of the check."""
        if not self._any_needs_weights(version):
            self._wake_weights(timer)
            self._wake_cache(timer)
            return {}
        return self._sync(version, timer)

    def resend(self, version: int, timer: PhaseTimer) -> None:
        """Send weights to the servers that need them while the others generate: some were restarted."""
        if self._any_needs_weights(version):
            metrics = self._sync(version, timer)
            checked = f", checked: {metrics}" if metrics else ""
            self._log.warning(f"weights {version} were resent to servers that needed them{checked}")

    def _sync(self, version: int, timer: PhaseTimer) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._config.sync_check != "off":
            first = self._attempt(version, timer, full=self._config.sync_check == "full" or self._compares_all)
            metrics = self._repeat(first, version, timer) if first.problems else self._accept(first)
        else:
            self._wake_weights(timer)
            self._load(version, timer, full=False)
            self._wake_cache(timer)
        self._engine.mark_verified()
        return metrics

    def _wake_weights(self, timer: PhaseTimer) -> None:
        with timer("phase_switch"):
            self._residency.make_room(self._engine.memory_to_wake)
            self._engine.wake_weights()

    def _wake_cache(self, timer: PhaseTimer) -> None:
        with timer("phase_switch"):
            self._residency.for_generation(self._engine.memory_to_wake)
            self._engine.wake_cache()

    def _any_needs_weights(self, version: int) -> bool:
        """Return True on all ranks if any engine needs these weights, because exporting them is collective."""
        return any(
            self._coordinator.all_gather_or_raise(lambda: self._engine.needs_weights(version), "reaching the engines")
        )

    def _load(self, version: int, timer: PhaseTimer, full: bool) -> tuple[verify.Manifest | None, bool]:
        """Send until every engine has these weights; servers may leave or join during a transfer.

        Returns the manifest of the last transfer (None if nothing was sent) and whether its checksums were
        collected: if `full`, and always for a new engine.
        """
        manifest = None
        with timer("weight_sync"):
            while self._any_needs_weights(version):
                if any(self._coordinator.all_gather(self._engine.is_new)):
                    full, self._passed = True, 0
                full = self._reads_back and full
                manifest = verify.Manifest(self._config.torch_dtype if full else None)
                self._residency.for_weight_sync()
                if self._engine.lacks_base:
                    self._engine.load_base(self.export.base())
                self._engine.load_weights(
                    manifest.record(self.export()), version, self.export.adapter, collect_checksums=full
                )
        return manifest, full and manifest is not None

    def _attempt(self, version: int, timer: PhaseTimer, full: bool) -> _Attempt:
        """Send and check, again if all servers were lost during the check and have to come back first."""
        while True:
            self._wake_weights(timer)
            manifest, full = self._load(version, timer, full)
            is_scored = not full or self._scores_next
            with timer("sync_check"):
                differences_of_logprobs = self._start_scoring() if is_scored else None
            self._wake_cache(timer)
            with timer("sync_check"):
                problems = list[verify.Problem]()
                unreadable = None
                if manifest is not None:
                    problems += self._export_problems(manifest)
                    if full:
                        held = self._held_weights()
                        of_tensors, unreadable = self._tensor_problems(manifest, held)
                        problems += of_tensors
                        if differences_of_logprobs is None and any(held):
                            return _Attempt(manifest, problems, unreadable, None)
                differences = {} if differences_of_logprobs is None else differences_of_logprobs()
            if differences:
                bound = self._bound
                beyond = {place: value for place, value in differences.items() if bound.exceeded(value, self._usual)}
                message = bound.exceeded(verify.Difference.largest(beyond.values()), self._usual) or ""
                problems += [verify.Problem(engine, message, numbers_only=True) for engine in beyond]
                return _Attempt(manifest, problems, unreadable, verify.Difference.largest(differences.values()))
            self._log.warning(f"every server with weights {version} was lost during the check; they are sent again")
            full = True  # the next servers are new

    def _start_scoring(self) -> Callable[[], dict[str, verify.Difference]]:
        """Return a function that returns the difference of every engine's log-probs from the trainer's."""
        scores = self._engine.start_scoring(self.canary.text)  # servers compute theirs meanwhile
        expected = self.canary.logprobs()  # here, while the policy is on the GPU
        return partial(self._logprob_differences, expected, scores)

    @property
    def _scores_next(self) -> bool:
        """Return True if log-probs are scored even if the checksums of all tensors are equal."""
        is_due = self._passed < _SCORED_FIRST or self._passed % _SCORED_EVERY == 0
        return is_due or self._config.sync_check == "full" or not self._compares_all

    def _repeat(self, first: _Attempt, version: int, timer: PhaseTimer) -> dict[str, float]:
        # Held weights of the failed sync; the second manifest shows what they should have been.
        held = self._held_weights() if self._reads_back else []
        self._engine.invalidate_weights()
        self._engine.sleep()
        self._passed = 0
        second = self._attempt(version, timer, full=True)
        problems = first.problems
        if self._reads_back and second.manifest is not None:
            problems = problems + self._tensor_problems(second.manifest, held)[0]
        failure = f"First attempt:\n{verify.describe(problems)}"
        if not second.problems:
            self._log.warning(f"weight sync {version} failed its check, was repeated, and then passed. {failure}")
            return self._accept(second)
        self._engine.invalidate_weights()
        advice = ""
        if all(problem.numbers_only for problem in second.problems):
            advice = (
                "\nThe engine holds exactly the tensors that were exported. So the export itself is wrong, or the "
                "engine computes something else with them: compare both with a saved checkpoint in plain transformers. "
                "If such a difference is normal for this setup, for example in a low precision, continue with "
                "--sync_check off."
            )
            if self._config.rollout_quantization != "none":
                advice += (
                    f" vLLM has quantized them (--rollout_quantization {self._config.rollout_quantization}), which "
                    "rounds weights and activations: see whether --rollout_quantization none passes."
                )
        raise EngineHasOtherWeights(
            f"weight sync {version} failed its check twice: the engine does not run the trainer's weights, and nothing "
            f"was generated. {failure}\nSecond attempt:\n{verify.describe(second.problems)}{advice}"
        )

    def _accept(self, attempt: _Attempt) -> dict[str, float]:
        self._passed += 1
        if attempt.manifest is not None:
            if self._specs is None:
                self._log_first(attempt.manifest, attempt)
            self._specs = attempt.manifest.specs
        if attempt.unreadable is not None:
            self._compares_all = not attempt.unreadable and self._config.rollout_quantization == "none"
        if (difference := attempt.difference) is None:
            return {}
        self._usual = max(difference.mean, self._usual or 0.0)
        return {"sync_check/mean_diff": difference.mean, "sync_check/max_diff": difference.max}

    def _log_first(self, manifest: verify.Manifest, attempt: _Attempt) -> None:
        difference = attempt.difference
        assert difference is not None, "the first sync is scored"
        tensors = len(manifest.specs)
        repacked = f", except {len(attempt.unreadable)} that it has repacked" if attempt.unreadable else ""
        quantized = "" if self._config.rollout_quantization == "none" else ", before it quantized its linear layers"
        holds = f"holds all {tensors} tensors bit for bit as they were sent{repacked}{quantized}"
        runs = f"runs the adapter of {tensors} tensors"
        text = self.canary.text
        files = {"an image": text.image, "a video": text.video, "a recording": text.recording}
        shown = [name for name, file in files.items() if file is not None]
        media = f" with {' and '.join(shown)}" if shown else ""
        self._log.info(
            f"first weight sync: vLLM {holds if self._reads_back else runs}; its log-probs of a fixed text of "
            f"{len(self.canary.tokens)} tokens{media} differ from the trainer's by {difference.mean:.2g} on average, "
            f"at most by {difference.max:.2g}"
        )

    # ---- problems: collective over ranks, with the same result on each

    def _export_problems(self, manifest: verify.Manifest) -> list[verify.Problem]:
        problems = verify.changed_specs(self._specs, manifest.specs) if self._specs is not None else []
        adapted = self.export.adapted_count
        merged = self.export.pop_merged_count()
        if merged != adapted and self.export.adapter is None:
            message = f"{adapted - merged} of {adapted} adapters were not merged into the weights sent"
            problems.append(verify.Problem(f"rank {self._coordinator.rank}", message))
        gathered = self._coordinator.all_gather((problems, adapted))
        problems = list(chain.from_iterable(of_rank for of_rank, _ in gathered))
        if self._config.exists and not any(count for _, count in gathered):
            problems.append(
                verify.Problem("trainer", "the run has an adapter, but it is bound to no module (--target_modules)")
            )
        return problems

    def _held_weights(self) -> list[list[WorkerWeights]]:
        """Return what the workers hold that each rank has queried."""
        return self._coordinator.all_gather_or_raise(self._engine.held_weights, "reading weights back")

    def _tensor_problems(
        self, manifest: verify.Manifest, held: Sequence[Sequence[WorkerWeights]]
    ) -> tuple[list[verify.Problem], set[str]]:
        """Compare all workers of the engines that this rank has queried."""
        engines = {worker.engine for worker in held[self._coordinator.rank]}
        workers = [worker for worker in chain.from_iterable(held) if worker.engine in engines]
        compared = verify.compare_with_sent(manifest.specs, manifest.checksums(), workers)
        problems, unreadable = zip(*self._coordinator.all_gather(compared), strict=True)
        return list(chain.from_iterable(problems)), set().union(*unreadable)

    def _logprob_differences(
        self, expected: Sequence[Sequence[float]], scores: Callable[[], dict[str, list[float]]]
    ) -> dict[str, verify.Difference]:
        """Return the difference of every engine's log-probs from those of the data-parallel rank farthest from it."""
        gathered = self._coordinator.all_gather_or_raise(scores, "scoring a fixed text on the engines")
        return {
            engine: verify.Difference.largest(
                verify.Difference.of(self.canary.compared(logprobs), of_rank) for of_rank in expected
            )
            for scores in gathered
            for engine, logprobs in scores.items()
        }

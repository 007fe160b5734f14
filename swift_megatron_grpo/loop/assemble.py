"""Assembly of the stages of one run from its configuration and the models that the trainer has loaded."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from swift_megatron_grpo.data.answers import Answer, AnswerSource
from swift_megatron_grpo.data.evaluation_sets import rows_by_name
from swift_megatron_grpo.data.image_reader import ImageReader, media_digests
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.data.teacher_prompts import TeacherPrompts
from swift_megatron_grpo.generation.interface import GenerationEngine
from swift_megatron_grpo.generation.local.conversations import MultiTurnVllm
from swift_megatron_grpo.generation.local.engine import LocalVllm, memory_to_start
from swift_megatron_grpo.generation.requests import infer_request
from swift_megatron_grpo.generation.vllm.drafts import HISTORY_BYTES
from swift_megatron_grpo.grading.rewards import RewardFunctions
from swift_megatron_grpo.loop.bodies import Bodies
from swift_megatron_grpo.loop.checks.canary import build_canary
from swift_megatron_grpo.loop.checks.experts import RouterAgreement
from swift_megatron_grpo.loop.checks.logprob_check import LogprobCheck
from swift_megatron_grpo.loop.completion_log import CompletionLog
from swift_megatron_grpo.loop.evaluation import Evaluation
from swift_megatron_grpo.loop.served_teacher import ServedTeacher
from swift_megatron_grpo.loop.stages import Stages
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.loop.trace import Trace
from swift_megatron_grpo.loop.weight_sync import WeightSync
from swift_megatron_grpo.output.recording.folder import RolloutDump
from swift_megatron_grpo.output.recording.folder import Settings as RecordingSettings
from swift_megatron_grpo.output.recording.reading import (
    EarlierRollouts,
    RolloutReplay,
    Text,
    can_be_used,
    recorded_texts,
)
from swift_megatron_grpo.output.recording.rows import BadRow, Limits
from swift_megatron_grpo.output.recording.unfinished import (
    UnfinishedRollout,
    read_unfinished,
    shared_settings,
    trim_logs,
)
from swift_megatron_grpo.runtime.deadlines.watchdog import Watchdog
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.algorithm import OPTIMAL_TOKEN
from swift_megatron_grpo.settings.batches import SHARE_PROMPTS_FROM
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.training.draft_head import DraftHead
from swift_megatron_grpo.training.engine import EngineSettings, MegatronEngine
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.training.reference import (
    MovingReference,
    Reference,
    ReferenceLayout,
    adapter_disabled,
    reference_adapter_active,
)
from swift_megatron_grpo.types import Prompt
from swift_megatron_grpo.weights.export.export import WeightExport
from swift_megatron_grpo.weights.export.kept_tensors import prefixes_without
from swift_megatron_grpo.weights.export.prediction_layers import stored_prediction_layers
from swift_megatron_grpo.weights.transport.buckets import NamedWeights

_SPARE_SEED = 1_000_000  # added to the data seed; far from the seeds of later epochs


@dataclass(frozen=True)
class FrozenCopy:
    """A model that is never trained, as reference or teacher; its own parallel layout (None: that of training)."""

    passes: Passes
    layout: ReferenceLayout | None


@dataclass(frozen=True)
class LoadedModels:
    """The models of this rank, as ms-swift and Megatron have built them."""

    wrapped: list[Any]  # for training (DDP), one per virtual pipeline stage
    unwrapped: list[Any]
    peft: list[Any]
    optimizer: Any  # of Megatron
    scheduler: Any  # of Megatron
    bridge: Any  # of mcore-bridge
    reference: FrozenCopy | None
    teacher: FrozenCopy | None = None  # may be that of the reference
    draft_head: DraftHead | None = None  # None: it is frozen, or there is none

    @property
    def trained(self) -> list[Any]:
        """Return all that is wrapped for training: the policy, and the layer that drafts."""
        return self.wrapped if self.draft_head is None else [*self.wrapped, self.draft_head.wrapped]


@dataclass(frozen=True)
class RunInputs:
    """The inputs of the stages, and where they report."""

    template: Any  # of ms-swift
    train_rows: Sequence[dict[str, Any]]
    answers: Sequence[Answer]  # of --chord_sft_dataset
    image_reader: ImageReader | None  # None: no row has media
    media: frozenset[str]  # image, video, audio: that rows have
    rewards: RewardFunctions
    servers: GenerationEngine | None  # None: vLLM runs in the training processes
    teacher: ServedTeacher | None  # None: there is no teacher, or it is a model of the ranks
    coordinator: Coordinator
    stop: StopRequest
    rollouts_done: int  # before this run, which may resume another; trained with all of their steps
    checkpoints: Sequence[str]  # folders that a run which resumes has loaded, the one that it continues first
    recording: RecordingSettings
    write_completions: Callable[[list[dict[str, Any]]], None]
    logger: logging.Logger


def assemble_loop(
    config: GRPOConfig, models: LoadedModels, run: RunInputs, trainer_state: Any, total_steps: int
) -> GRPOLoop:
    """Build the loop, and freeze the heap. A run that resumes continues beta and the interrupted rollout."""
    unfinished = _unfinished(config, run)
    first_new_rollout = run.rollouts_done + (unfinished is not None)
    steps_done: int = trainer_state.iteration
    if _reports(run) and (steps_done > 0 or config.recording.continues):
        trim_logs(config.log.output_dir, steps_done, first_new_rollout)
    stages = assemble_stages(config, models, run, first_new_rollout)
    loop = GRPOLoop(config, stages, trainer_state, steps_done, total_steps, unfinished)
    loop.kl_controller.restore(run.checkpoints)
    freeze_heap()
    return loop


def freeze_heap() -> None:
    """Collect all garbage once, and keep the objects of set-up out of later full collections.

    Adapters on 128 experts of 24 layers leave 1.1 million objects after set-up. A full collection takes 0.56 s on a CPU
    core, with a frozen heap 0.02 s, and there is one within four steps. Only vLLM in the training processes freezes the
    heap itself. Cycles among frozen objects are never found, but what exists now lives as long as the run;
    `megatron_torn_down`, which ends a model before its process, unfreezes them.
    """
    gc.collect()
    gc.freeze()


def _unfinished(config: GRPOConfig, run: RunInputs) -> UnfinishedRollout | None:
    """Read the rollout that the checkpoint interrupted; None: there is none, or it is generated again."""
    problem = None
    found = None
    if run.checkpoints:
        sources = (prompt_source(config, run), prompt_source(config, run, spare=True))

        def find(prompt_id: str) -> Prompt:
            prompts = (source.find(prompt_id) for source in sources)
            prompt = next((prompt for prompt in prompts if prompt is not None), None)
            if prompt is None:
                raise BadRow(f"the dataset has no prompt {prompt_id}")
            return prompt

        folder = Path(run.checkpoints[0])
        limits = _limits(config, run)
        try:
            found = read_unfinished(folder, run.rollouts_done, shared_settings(config), find, limits, media_digests)
        except BadRow as error:
            problem = str(error)
    problems = [text for text in run.coordinator.all_gather(problem) if text is not None]
    if problems:
        run.logger.warning(f"the rollout that the checkpoint interrupts is generated again: {problems[0]}")
    return None if problems else found


def assemble_stages(config: GRPOConfig, models: LoadedModels, run: RunInputs, first_new_rollout: int) -> Stages:
    """Build the stages. `first_new_rollout`: the number of the first one that this run generates."""
    residency = Residency(
        config.offloading,
        models.trained,
        _models_of(models.reference),
        models.optimizer,
        log=run.logger.info,
        teacher=_models_of(models.teacher),
    )
    recording = config.recording
    training = training_engine(config, models)  # refuses what the model cannot do, before vLLM starts for minutes
    generation = None if recording.replay is not None else run.servers or _start_vllm(config, run, residency)
    if training.passes.reason_to_repeat_prompts is not None:
        run.logger.info(
            f"--share_prompts auto repeats prompts for each completion: {training.passes.reason_to_repeat_prompts}."
        )
    canary = build_canary(
        run.template.tokenizer,
        run.image_reader,
        run.media,
        longest=config.engine.vllm_max_model_len if config.server is None else config.server.least_length,
        trained_models=models.wrapped,
        coordinator=run.coordinator,
    )
    sync = None
    if generation is not None:
        adapter_only = (config.engine if config.server is None else config.server).lora_rank is not None
        held = frozenset[str]().union(*run.coordinator.all_gather(generation.held_media))
        left_out = prefixes_without(held, models.unwrapped[0].config)
        stored = _stored_weights(config) if models.draft_head is None else tuple
        export = WeightExport(models.bridge, models.unwrapped, adapter_only, left_out, stored)
        sync = WeightSync(config.adapter, generation, residency, export, canary, run.coordinator, run.logger)
    dump, earlier = _dump(config, run, first_new_rollout)
    drafts = generation.drafts if isinstance(generation, LocalVllm) else None
    if drafts is not None and recording.continues and not config.engine.predicts_drafts:
        drafts.remember(_recorded_texts(config, run.coordinator, first_new_rollout))
    bodies = None if drafts is not None else _bodies(config, run, [training.passes, canary.passes], models.reference)
    return Stages(
        prompts=prompt_source(config, run, taken=run.rollouts_done * config.batch.rollout_prompts),
        answers=_answers(config, run),
        spare_prompts=prompt_source(config, run, spare=True),
        image_reader=run.image_reader,
        generation=generation,
        drafts=drafts,
        rewards=run.rewards,
        training=training,
        reference=reference_policy(config, models, training, run.coordinator),
        moving_reference=_moving_reference(config, models, residency),
        teacher=run.teacher or teacher_policy(config, models, training, run.coordinator),
        teacher_prompts=TeacherPrompts(run.template, infer_request) if config.teacher.teacher_prompts else None,
        residency=residency,
        sync=sync,
        logprob_check=LogprobCheck(
            training.passes,
            canary.passes,
            run.coordinator,
            config.sampling,
            config.adapter.rollout_quantization,
            bodies,
            stops_at_a_gap=config.engine.predicts_drafts,
        ),
        router_agreement=RouterAgreement(training.passes, run.coordinator, config.routing.router_agreement_samples)
        if config.routing.router_agreement_samples
        else None,
        coordinator=run.coordinator,
        bodies=bodies,
        log=_completion_log(config, run, first_new_rollout),
        dump=dump,
        earlier=earlier,
        replay=RolloutReplay(recording.replay, _limits(config, run), media_digests) if recording.replay else None,
        watchdog=_start_watchdog(config, run),
        trace=Trace(
            config.trace_steps,
            Path(config.log.output_dir),
            run.coordinator,
            list if generation is None else generation.answered_requests,
        ),
        stop=run.stop,
    )


def _stored_weights(config: GRPOConfig) -> Callable[[], NamedWeights]:
    """Return what reads the weights that the engine needs and that this run does not train."""
    engine = config.engine
    return stored_prediction_layers(engine.model_dir, engine.torch_dtype) if engine.predicts_drafts else tuple


def _completion_log(config: GRPOConfig, run: RunInputs, first_new_rollout: int) -> CompletionLog:
    names, decode = run.rewards.names, run.template.safe_decode
    return CompletionLog(config.log, names, decode, run.write_completions, _reports(run), first_new_rollout)


def _bodies(
    config: GRPOConfig, run: RunInputs, passes: Sequence[Passes], reference: FrozenCopy | None
) -> Bodies | None:
    """Return what brings the tokens of completions to these passes, and of the reference; None: all are everywhere."""
    if _reads_all_tokens(config, run):
        return None
    bodies = Bodies(run.coordinator)
    for served in (*passes, *([] if reference is None else [reference.passes])):
        bodies.serve(served)
    return bodies


def _reads_all_tokens(config: GRPOConfig, run: RunInputs) -> bool:
    """Return True if some stage reads the tokens of all completions on every rank, so that they cannot stay on one."""
    recording, routing = config.recording, config.routing
    return (
        run.coordinator.world_size == 1
        or recording.dump is not None
        or recording.replay is not None
        or bool(run.media)
        or config.teacher.exists
        or bool(config.reference.sizes)
        or routing.router_replay_mode != "disabled"
        or bool(routing.router_agreement_samples)
        or config.loss.correction.m2_threshold is not None
        or config.grading.advantage_estimator == OPTIMAL_TOKEN
    )


def _reports(run: RunInputs) -> bool:
    return run.coordinator.rank == run.coordinator.world_size - 1


def training_engine(config: GRPOConfig, models: LoadedModels) -> MegatronEngine:
    settings = engine_settings(config)
    return MegatronEngine(models.wrapped, models.optimizer, models.scheduler, settings, models.draft_head)


def engine_settings(config: GRPOConfig) -> EngineSettings:
    packing = config.micro_batches
    return EngineSettings(
        temperature=config.sampling.temperature,
        micro_batch_size=config.batch.micro_batch_size,
        max_tokens=packing.max_tokens_per_micro_batch,
        infer_max_tokens=packing.infer_max_tokens_per_micro_batch,
        infer_micro_batch_size=packing.infer_batch_size,
        share_prompts_from=packing.share_prompts_from,
        vision_tower_share=config.vision_tower_share,
    )


def frozen_engine_settings(config: GRPOConfig) -> EngineSettings:
    """Return the settings of frozen copies. In its own layout, a rank may get other samples than it trains."""
    settings = engine_settings(config)
    if not config.reference.sizes:
        return settings
    if settings.share_prompts_from is not None:  # its layout may not allow it
        settings = replace(settings, share_prompts_from=SHARE_PROMPTS_FROM["auto"])
    if settings.max_tokens is not None or settings.infer_max_tokens is not None:
        return replace(settings, max_tokens=settings.infer_max_tokens or settings.max_tokens)
    size = settings.infer_micro_batch_size or settings.micro_batch_size
    return replace(settings, micro_batch_size=1, infer_micro_batch_size=size)


def reference_policy(
    config: GRPOConfig, models: LoadedModels, training: MegatronEngine, coordinator: Coordinator
) -> Reference | None:
    if config.reference.beta == 0:
        return None
    if models.reference is None:
        active = adapter_disabled if config.reference.adapter is None else reference_adapter_active
        return Reference(training.passes, partial(active, models.peft))
    return _policy_of(models.reference, coordinator)


def _moving_reference(config: GRPOConfig, models: LoadedModels, residency: Residency) -> MovingReference | None:
    settings = config.reference
    if not settings.sync_ref_model:
        return None
    period, share = settings.ref_model_sync_steps, settings.ref_model_mixup_alpha
    return MovingReference(_models_of(models.reference), models.unwrapped, residency, period, share)


def teacher_policy(
    config: GRPOConfig, models: LoadedModels, training: MegatronEngine, coordinator: Coordinator
) -> Reference | None:
    if not config.teacher.exists:
        return None
    if models.teacher is not None:
        teacher = _policy_of(models.teacher, coordinator)
    elif config.teacher.is_base:
        teacher = Reference(training.passes, partial(adapter_disabled, models.peft))
    else:
        teacher = Reference(training.passes)  # the policy, which reads another prompt
    # Ranks get equal work, so other prompts or a model of another size are divided between them in another way.
    divided_otherwise = config.teacher.teacher_prompts or models.teacher is not None
    return replace(teacher, coordinator=coordinator) if divided_otherwise else teacher


def _policy_of(copy: FrozenCopy, coordinator: Coordinator) -> Reference:
    return Reference(copy.passes) if copy.layout is None else Reference(copy.passes, copy.layout.active, coordinator)


def _models_of(copy: FrozenCopy | None) -> Sequence[Any]:
    return [] if copy is None else copy.passes.models


def prompt_source(config: GRPOConfig, run: RunInputs, spare: bool = False, taken: int = 0) -> PromptSource:
    """Return the prompts of the training dataset, or the same ones in the order in which they replace others."""
    return PromptSource(
        run.train_rows,
        config.data.seed + (_SPARE_SEED if spare else 0),
        config.data.train_dataloader_shuffle if spare else config.data.shuffles,
        run.template.template_meta.default_system,
        taken,
        label="spare-" if spare else "",
    )


def _answers(config: GRPOConfig, run: RunInputs) -> AnswerSource | None:
    if not run.answers:
        return None
    micro_batches = config.batch.global_batch_size // config.batch.micro_batch_size
    return AnswerSource(run.answers, config.data.seed, config.chord.answers(micro_batches))


def evaluation(config: GRPOConfig, template: Any, rows: Any, loop: GRPOLoop) -> Evaluation:
    system = template.template_meta.default_system
    datasets = {
        name: PromptSource(part, config.data.seed, False, system, label=f"{name}-")
        for name, part in rows_by_name(rows, config.evaluation.names).items()
    }
    return Evaluation(config, datasets, loop.evaluate)


def _dump(
    config: GRPOConfig, run: RunInputs, first_new_rollout: int
) -> tuple[RolloutDump | None, EarlierRollouts | None]:
    """Return the writer of --rollout_dump, and the reader of what an earlier run has left there from that one on."""
    folder = config.recording.dump
    flags = dict(config.typed)
    if folder is None:
        return None, None
    writes = run.coordinator.rank == 0
    uses = writes and config.recording.continues and can_be_used(folder, flags)
    dump = RolloutDump(folder, run.recording, first_new_rollout, writes, media_digests, flags, keeps_later=uses)
    reader = EarlierRollouts(folder, _limits(config, run), media_digests, run.logger.info)
    return dump, reader if uses else None


def _recorded_texts(config: GRPOConfig, coordinator: Coordinator, before: int) -> Iterator[Text]:
    """Return what rank 0 finds in the dump, on all ranks: those of an engine must draft the same."""
    folder = config.recording.dump

    def read() -> list[Text]:
        if folder is None or coordinator.rank:
            return []
        return recorded_texts(folder, before, HISTORY_BYTES, config.vocabulary)

    return chain.from_iterable(coordinator.all_gather_or_raise(read, "reading dumped rollouts"))


def _limits(config: GRPOConfig, run: RunInputs) -> Limits:
    return Limits(config.vocabulary, len(run.rewards.names))


def _start_vllm(config: GRPOConfig, run: RunInputs, residency: Residency) -> GenerationEngine:
    began = time.monotonic()
    run.logger.info("vLLM starts: it loads the model and, on a GPU, captures graphs and compiles what no cache holds")
    needed = memory_to_start(config.engine)
    residency.make_room(needed)
    residency.for_generation(needed)
    if config.turns is None:
        generation: GenerationEngine = LocalVllm(config.engine, run.template, run.stop)
    else:
        generation = MultiTurnVllm(config.engine, config.turns, run.template, run.stop)
    generation.sleep()
    residency.restore()
    run.logger.info(f"vLLM started in {time.monotonic() - began:.1f} s; next: the first weight sync")
    return generation


def _start_watchdog(config: GRPOConfig, run: RunInputs) -> Watchdog:
    """Start the watchdog, and handle signals from now on: it also limits how long a stop may take."""
    coordinator = run.coordinator
    name = coordinator.all_gather(time.strftime("stuck-%Y%m%d-%H%M%S.txt"))[0]  # one name for all ranks
    report = Path(config.log.output_dir).absolute() / name
    watchdog = Watchdog(report, coordinator.rank, coordinator.world_size, config.deadlines.phase_timeout)

    def limit_stop(seconds: float) -> None:
        watchdog.limit_everything("the stop after a signal", seconds, "--stop_grace", "use a larger --stop_grace")

    run.stop.listen(limit_stop, watchdog.expect_exit)
    return watchdog

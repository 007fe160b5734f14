"""The trainer class that ms-swift builds for `--rlhf_type grpo`: builds the stages, and delegates to loop/step.py."""

import os
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from swift.megatron.model import get_mcore_model
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils.megatron_lm_utils import is_empty_async_queue, load_mcore_checkpoint
from swift.template import Template
from swift.utils import JsonlWriter, get_logger, is_master, safe_snapshot_download

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.loop.assemble import (
    FrozenCopy,
    LoadedModels,
    RunInputs,
    assemble_loop,
    evaluation,
    frozen_engine_settings,
    training_engine,
)
from swift_megatron_grpo.loop.evaluation import Evaluation
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter, in_order_of_removal
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.runtime.stopping.request import StoppedBySignal, last_line
from swift_megatron_grpo.settings.config import GRPOConfig
from swift_megatron_grpo.settings.trained import Trained
from swift_megatron_grpo.trainer.start import Start, checkpoint_writer, moved_reference, next_save, resumed_from
from swift_megatron_grpo.training import draft_head, engine, passes, preparation, reference, trained_weights
from swift_megatron_grpo.training.draft_head import DraftHead
from swift_megatron_grpo.training.layers.attention_check import check_attention
from swift_megatron_grpo.training.upstream_fixes import adapter_settings, hybrid_optimizer, resumed_schedule, sgd
from swift_megatron_grpo.training.upstream_fixes.linear_attention import supply_context_parallelism
from swift_megatron_grpo.training.upstream_fixes.marks import mark_sharded_parameters
from swift_megatron_grpo.training.upstream_fixes.result_queue import end_writers_with_rank
from swift_megatron_grpo.training.vision_tower import freeze_parts_without_rows
from swift_megatron_grpo.weights.export.export import AdaptedModules, merged_on_read
from swift_megatron_grpo.weights.export.joined_projections import keep_joined
from swift_megatron_grpo.weights.export.kept_tensors import keep_untrained_tensors
from swift_megatron_grpo.weights.export.unread_tensors import every_tensor_read

logger = get_logger()


class MegatronGRPOTrainer(BaseMegatronTrainer):
    """Replaces ms-swift's trainer of the same name."""

    args: GRPOArguments
    loop: GRPOLoop  # this and the next two from setup_training on
    checkpoints: CheckpointWriter
    evaluation: Evaluation  # with validation datasets only
    _train_metrics: dict[str, Any]  # ms-swift's, of the steps since the last one that was logged

    def __init__(self, args: GRPOArguments, template: Template, vllm_client: Start) -> None:
        """Build the models. `vllm_client`: ms-swift's name for what plugin/register.py prepares."""
        self.settings, self.rewards, self.remote = vllm_client.settings, vllm_client.rewards, vllm_client.servers
        self.teacher, self.answers = vllm_client.teacher, vllm_client.answers
        self.coordinator, self.stop, self._locked = vllm_client.coordinator, vllm_client.stop, vllm_client.locked
        self._merged = ExitStack()
        self._is_set_up = False
        self.draft_head: DraftHead | None = None
        super().__init__(args, template)

    # ---- called by the parent class during construction

    def prepare_model(self) -> None:
        supply_context_parallelism()
        self.args.calculate_per_token_loss = False  # Megatron would divide gradients once more
        super().prepare_model()
        mark_sharded_parameters(self.unwrapped_models)  # also in adapters
        if self.args.check_attention:
            check = partial(check_attention, self.unwrapped_models, RankPosition.from_megatron())
            self.coordinator.all_gather_or_raise(check, "checking the attention kernels")
        self.frozen_reference, self.frozen_teacher = load_frozen_copies(self.args, self.settings, self.template)

    def _prepare_peft_model(self, models: list[torch.nn.Module]) -> list[Any]:
        args = self.args
        keep_joined(self.bridge, args.model_dir)
        mark_sharded_parameters(models)  # mcore-bridge chooses the layers of adapters by the marks
        with adapter_settings.adapter_settings_applied(), every_tensor_read(models[0].config, args.unread_tensors):
            peft_models: list[Any] = super()._prepare_peft_model(models)
            reference.load_reference_adapter(self.bridge, models, self.settings.reference.adapter)
        freeze_parts_without_rows(models, args.trained_media)
        if args.mtp_num_layers:
            draft_head.freeze(models)
        trained_weights.check_trained(models, frozen_by=args.of(Trained).freezing)
        self._seeds_dropout = adapter_settings.has_adapter_dropout(models)
        note = preparation.prepare_trained(
            models, args.fast_kernels, args.recompute_elementwise, args.overlap_grad_reduce, args.megatron_extra_kwargs
        )
        self._kept = keep_untrained_tensors(self.bridge, self.config, args.model_dir, args.save_missing_weights)
        for line in filter(None, (note, self._kept.note if args.tuner_type == "full" or args.merge_lora else None)):
            logger.info(line)
        return peft_models

    def get_optimizer_and_scheduler(self) -> tuple[Any, Any]:
        optimizer, scheduler = super().get_optimizer_and_scheduler()
        sgd.supply_states(optimizer)
        if self.args.mtp_num_layers:
            self.draft_head = DraftHead(self.wrapped_models)
            optimizer = self.draft_head.join(optimizer, scheduler)
        return optimizer, scheduler

    @torch.no_grad()  # the distributed optimizer's own loading of fp32 weights writes into views that need gradients
    def _load_checkpoint(self) -> None:
        args, scheduler = self.args, self.opt_param_scheduler
        with_states = not (args.finetune or args.no_load_optim)
        with (
            hybrid_optimizer.loading(self.optimizer, with_states),
            resumed_schedule.settings_of_flags(scheduler),
        ):
            super()._load_checkpoint()
        if with_states:
            resumed_schedule.continue_after(scheduler, self.state.iteration, args.global_batch_size)

    def merge_lora_adapters(self, adapter_name: str = "default") -> None:
        """Merge adapters while weights are exported (--merge_lora), instead of adding and subtracting them in place."""
        self._merged.enter_context(merged_on_read(self.bridge, AdaptedModules.find(self.bridge, self.unwrapped_models)))

    def unmerge_lora_adapters(self) -> None:
        self._merged.close()

    # ---- called by the parent class during training

    def setup_training(self, train_dataset: Any, val_dataset: Any) -> tuple[None, None]:
        self.setup_model_training()
        self.loop = self._build_loop(train_dataset)
        steps_done = self.state.iteration
        self.checkpoints = checkpoint_writer(self.args, self.template, train_dataset, self.coordinator, steps_done)
        if not self.settings.recording.rollout_only:
            self.checkpoints.announce_size(next_save(self.args, steps_done), self._checkpoint_bytes())
        self._is_set_up = True
        if val_dataset is not None:
            self.evaluation = evaluation(self.settings, self.template, val_dataset, self.loop)
            if self.settings.evaluation.before_training and self.state.iteration == 0:
                self.evaluate(None)
        return None, None

    def _build_loop(self, train_rows: Any) -> GRPOLoop:
        args = self.args
        rollouts_done = self._rollouts_done
        args.check_replay_reach(rollouts_done)
        loaded = (args.mcore_adapter, args.mcore_model, *args.adapters, args.model)
        writer = JsonlWriter(os.path.join(args.output_dir, "completions.jsonl"), write_on_rank="last")
        most = {"image": args.most_images, "video": args.most_videos, "audio": args.most_recordings}
        media = frozenset(kind for kind, number in most.items() if number)
        inputs = RunInputs(
            template=self.template,
            train_rows=train_rows,
            answers=self.answers,
            image_reader=ImageReader(self.template) if media else None,
            media=media,
            rewards=self.rewards,
            servers=self.remote,
            teacher=self.teacher,
            coordinator=self.coordinator,
            stop=self.stop,
            rollouts_done=rollouts_done,
            checkpoints=tuple(path for path in loaded if path is not None) if self.state.iteration > 0 else (),
            recording=args.recording_settings(),
            write_completions=writer.append,
            logger=logger,
        )
        return assemble_loop(self.settings, self.loaded_models(), inputs, self.state, args.train_iters)

    @property
    def _rollouts_done(self) -> int:
        trained_per_rollout = self.settings.batch.generation_batch_size * self.settings.num_iterations
        return int(self.state.consumed_train_samples // trained_per_rollout)

    def _checkpoint_bytes(self) -> float:
        """Estimate the bytes of a checkpoint that this rank writes."""
        return trained_weights.saved_bytes(self.unwrapped_models, self.settings.saved, self._kept.bytes)

    def loaded_models(self) -> LoadedModels:
        return LoadedModels(
            wrapped=self.wrapped_models, unwrapped=self.unwrapped_models, peft=self.peft_models,
            optimizer=self.optimizer, scheduler=self.opt_param_scheduler, bridge=self.bridge,
            reference=self.frozen_reference, teacher=self.frozen_teacher, draft_head=self.draft_head,
        )  # fmt: skip

    def build_engine(self) -> engine.MegatronEngine:
        return training_engine(self.settings, self.loaded_models())

    def save_checkpoint(self) -> None:
        if not (self.args.no_save_optim and self.args.save_safetensors):  # Megatron writes nothing otherwise
            end_writers_with_rank()
        prompts = self._rollouts_done * self.settings.batch.rollout_prompts
        with self.checkpoints.writing(self.state.iteration, prompts, self._checkpoint_bytes()):
            super().save_checkpoint()
            self.loop.save(self.state.last_model_checkpoint)
        self._finish_checkpoints()

    def _finish_checkpoints(self) -> None:
        """Complete checkpoints whose files are on disk, then remove old ones (--save_total_limit)."""
        being_written = self.args.async_save and not is_empty_async_queue()
        if not being_written and self.checkpoints.finish() and is_master():
            super()._rotate_checkpoints(self.args.output_dir)

    def _rotate_checkpoints(self, output_dir: str) -> None:
        """Do nothing: the parent class calls this before the new checkpoint is complete."""

    def _sorted_checkpoints(self, output_dir: str) -> list[str]:
        """List the checkpoints that --save_total_limit counts, in the order in which it removes them."""
        found = super()._sorted_checkpoints(output_dir)
        return in_order_of_removal(found, resumed_from(self.args), self.state.best_model_checkpoint)

    def train(self, train_dataset: Any, val_dataset: Any) -> None:
        try:
            if self.settings.recording.rollout_only:
                self._generate_only(train_dataset)
            else:
                super().train(train_dataset, val_dataset)
        except SharedFailure:
            self._end_early()
            raise
        finally:
            self.stop.close()
            if self.remote is not None:
                self.remote.shutdown()  # servers keep running, but cancel the requests of this run

    def _generate_only(self, train_dataset: Any) -> None:
        """Generate as many rollouts as training would use, counted as iterations for callbacks."""
        self.setup_training(train_dataset, None)
        while self.state.iteration < self.args.train_iters:
            metrics = self.loop.generate_only()
            logged: dict[str, Any] = {}
            self._aggregated_metrics([_tensors(metrics)], logged)
            for _ in range(self.args.steps_per_rollout):
                self.call_event("on_step_begin")
                self.state.iteration += 1
                self.call_event("on_step_end")
            self.state.should_log = self.state.should_eval = self.state.should_save = False
            self.on_log(logs=logged)
        self.finalize_training()

    def run_train_step(self, train_data_iterator: None, val_data_iterator: None) -> bool:
        # ms-swift's callback logs step 1 and every --logging_steps; a run of any length ends with its last step
        self.state.should_log = self.state.iteration + 1 >= self.args.train_iters
        with self.checkpoints.finishing_earlier_saves():
            continues: bool = super().run_train_step(train_data_iterator, val_data_iterator)
        return continues

    def train_step(self, train_data_iterator: None) -> tuple[list[dict[str, torch.Tensor]], float, bool]:
        if self._seeds_dropout:
            adapter_settings.seed_adapter_dropout(self.args.seed, self.state.iteration)
        self._finish_checkpoints()
        metrics = self.loop.train_step()
        grad_norm = metrics.pop("grad_norm")
        return [_tensors(metrics)], grad_norm, True

    def _end_early(self) -> None:
        """Save what was trained, after a failure that all ranks share. Raise StoppedBySignal after a signal."""
        if not self._is_set_up:  # no step has begun
            return
        folder = self._save_last_step()
        if self._train_metrics:
            self.on_log(logs=self._train_metrics)
            self._train_metrics = {}
        number = self.stop.agreed()
        if number is None:
            return
        self._release()
        line = last_line(
            number,
            step=self.state.iteration,
            steps=self.args.train_iters,
            checkpoint=folder,
            has_adapter=self.args.has_adapter,
            has_optimizer=not self.args.no_save_optim,
            finds_checkpoint=self.args.resume == "auto",
        )
        raise StoppedBySignal(self.stop, number, line)

    def _save_last_step(self) -> str | None:
        """Save a checkpoint of the last complete step, unless there is one. Return its folder; None without a step."""
        step = self.state.iteration
        if self.settings.recording.rollout_only or step == self._start_iteration:
            return None
        folder = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        if self.state.last_model_checkpoint != folder:
            self.loop.stages.residency.restore()
            self.save_checkpoint()
            logger.info(f"the run stops; the last complete step is saved in {folder}")
        return folder

    def evaluate(self, val_data_iterator: None) -> dict[str, Any]:
        self.call_event("on_eval_begin")
        metrics = self.evaluation.run(lambda: self.call_event("on_eval_step"))
        self.loop.stages.residency.restore()  # the next event may save a checkpoint
        logged: dict[str, Any] = {}
        self._aggregated_metrics([_tensors(metrics)], logged)
        self.on_log(logs=logged, prefix="eval_")
        self.call_event("on_eval_end")
        return logged

    def finalize_training(self) -> None:
        self._release()
        self.loop.stages.watchdog.close()

    def _release(self) -> None:
        """Finish callbacks, checkpoints that are still being written, and generation; the watchdog continues."""
        with self.checkpoints.finishing_earlier_saves():
            super().finalize_training()
        self._finish_checkpoints()
        if self.loop.stages.generation is not None:
            self.loop.stages.generation.shutdown()

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        raise TypeError("MegatronEngine runs the forward pass of this trainer")


def _tensors(metrics: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, device=torch.cuda.current_device()) for name, value in metrics.items()}


def load_frozen_copies(
    args: GRPOArguments, config: GRPOConfig, template: Template
) -> tuple[FrozenCopy | None, FrozenCopy | None]:
    """Load the frozen reference and the frozen teacher, in the layout of such copies; None where it is not a copy.

    One copy is both if they are the same model.
    """
    sizes = config.reference.layout(config.batch.layout)
    if config.reference.model_dir is None and not config.teacher.is_copy:
        return None, None
    layout = None if sizes is None else reference.ReferenceLayout(sizes, args.ddp_timeout // 60)

    def load(of_copy: GRPOArguments, model_config: Any, folder: str) -> FrozenCopy:
        with nullcontext() if layout is None else layout.active():
            models = get_mcore_model(of_copy, model_config)
            for model in models:
                model.to(torch.cuda.current_device())
            if folder == of_copy.mcore_ref_model:
                load_mcore_checkpoint(of_copy, models, load_arg="mcore_ref_model")
            else:
                path = safe_snapshot_download(folder, use_hf=args.use_hf, hub_token=args.hub_token)
                with every_tensor_read(models[0].config, args.unread_tensors):
                    models[0].config.bridge.load_weights(models, path)
            preparation.prepare_frozen(models, args.fast_kernels)
            return FrozenCopy(passes.Passes(models, frozen_engine_settings(config)), layout)

    of_reference = of_teacher = None
    if config.reference.model_dir is not None:
        moved = moved_reference(args) if config.reference.sync_ref_model else None
        of_reference = load(args.of_reference(), template.config, moved or config.reference.model_dir)
    if config.reference.is_teacher:
        of_teacher = of_reference
    elif config.teacher.is_copy:
        of_teacher = load(args.of_teacher(), args.teacher_model_config(template.config), args.teacher_model_dir)
    return of_reference, of_teacher

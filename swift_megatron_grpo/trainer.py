"""The trainer class that ms-swift builds for `--rlhf_type grpo`.

It assembles the stages and delegates every step to loop/step.py. Models, optimizer, schedule, checkpoints and
callbacks belong to its parent class.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swift.megatron.model import get_mcore_model
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils.megatron_lm_utils import is_empty_async_queue, load_mcore_checkpoint
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.template import Template
from swift.utils import JsonlWriter, get_dist_setting, get_logger, is_last_rank, is_master, safe_snapshot_download

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.resume import check_or_fall_back
from swift_megatron_grpo.arguments.to_config import configure, configure_server
from swift_megatron_grpo.data.image_reader import ImageReader
from swift_megatron_grpo.generation.local.engine_settings import check_engine_settings
from swift_megatron_grpo.generation.protocol.model_identity import model_identity
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
from swift_megatron_grpo.grading import RewardFunctions, gym_reward
from swift_megatron_grpo.loop.assemble import (
    FrozenReference,
    LoadedModels,
    RunInputs,
    assemble_loop,
    evaluation,
    reference_engine_settings,
    training_engine,
)
from swift_megatron_grpo.loop.evaluation import Evaluation
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.output.checkpoints.identity import dataset_identity, tokenizer_identity
from swift_megatron_grpo.output.checkpoints.manifest import has_manifest
from swift_megatron_grpo.output.checkpoints.saving import CheckpointWriter, Identity
from swift_megatron_grpo.output.checkpoints.verifying import check_order_of_experts, check_sources, compare_datasets
from swift_megatron_grpo.output.disk.files import threads_of_a_rank
from swift_megatron_grpo.output.disk.folder_lock import LockedFolders
from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.parallel import Coordinator, RankPosition
from swift_megatron_grpo.runtime.stopping.report import StoppedBySignal, last_line
from swift_megatron_grpo.runtime.stopping.request import StopRequest
from swift_megatron_grpo.settings.recording import Recording
from swift_megatron_grpo.settings.rewards import Rewards
from swift_megatron_grpo.settings.trained import Trained
from swift_megatron_grpo.training.checkpoint_size import saved_bytes
from swift_megatron_grpo.training.engine import MegatronEngine
from swift_megatron_grpo.training.layers.attention_check import check_attention
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.training.preparation import prepare_frozen, prepare_trained
from swift_megatron_grpo.training.reference import FrozenCopy, load_reference_adapter
from swift_megatron_grpo.training.reference_layout import ReferenceLayout
from swift_megatron_grpo.training.trained_weights import check_trained
from swift_megatron_grpo.training.upstream_fixes import hybrid_optimizer
from swift_megatron_grpo.training.upstream_fixes.adapter_settings import (
    adapter_settings_applied,
    has_adapter_dropout,
    seed_adapter_dropout,
)
from swift_megatron_grpo.training.upstream_fixes.linear_attention_context import supply_context_parallelism
from swift_megatron_grpo.training.upstream_fixes.result_queue import end_writers_with_rank
from swift_megatron_grpo.training.upstream_fixes.tensor_parallel_marks import mark_sharded_parameters
from swift_megatron_grpo.weights.export.export import AdaptedModules, merged_on_read
from swift_megatron_grpo.weights.export.joined_projections import keep_joined
from swift_megatron_grpo.weights.export.kept_tensors import keep_untrained_tensors
from swift_megatron_grpo.weights.export.unread_tensors import every_tensor_read

logger = get_logger()


class MegatronGRPOTrainer(BaseMegatronTrainer):
    """Replaces ms-swift's trainer of the same name."""

    args: GRPOArguments

    def __init__(self, args: GRPOArguments, template: Template, vllm_client: None = None) -> None:
        functions, names = resolve_reward_funcs(args.reward_funcs, args=args)  # may fail: before the model loads
        self.coordinator = Coordinator(timedelta(seconds=args.ddp_timeout))
        self._locked = LockedFolders(args.output_dir, args.of(Recording).dump, self.coordinator)
        self._check_checkpoints(args, template)
        self.stop = StopRequest(self.coordinator, args.stop_grace)
        self.remote = self._connect_to_servers(args)
        if args.of(Rewards).by_environment:
            functions, names = [*functions, gym_reward], [*names, gym_reward.__name__]
        self.settings = configure(args)
        if self.settings.server is None and self.settings.recording.replay is None:
            check_engine_settings(self.settings.vllm)
        self.rewards = RewardFunctions(names, functions, self.settings.grading.reward_weights)
        self._merged = ExitStack()
        self.loop: GRPOLoop | None = None
        self.evaluation: Evaluation | None = None
        super().__init__(args, template)

    def _check_checkpoints(self, args: GRPOArguments, template: Template) -> None:
        """Refuse checkpoints that are damaged or do not fit the run, before the model loads."""
        tokenizer = tokenizer_identity(template.tokenizer) if args.resumes else None
        model, threads = model_identity(args.model_config), threads_of_a_rank(_ranks_of_this_machine())
        identity, ranks = (model, tokenizer, args.verify_checkpoint), self.coordinator
        for warning in check_or_fall_back(args, lambda used: check_sources(used, *identity, ranks, threads)):
            logger.warning(warning)
        check_order_of_experts(args.optimizer_source, args.experts_in_order)

    def _connect_to_servers(self, args: GRPOArguments) -> RemoteVllm | None:
        """Check the rollout servers before the model loads; None: vLLM runs in the training processes."""
        config = configure_server(args)
        if config is None:
            return None
        transport = WeightSender(torch.device(torch.cuda.current_device()), config.bucket_bytes)
        remote = RemoteVllm(config, transport, self.coordinator.rank, self.stop.raise_if_out_of_time)
        environments_grade = self.coordinator.all_gather_or_raise(remote.check, "reaching the rollout servers")
        args.set_grading_of_servers(any(environments_grade))
        return remote

    # ---- called by the parent class during construction

    def prepare_model(self) -> None:
        supply_context_parallelism()
        super().prepare_model()
        mark_sharded_parameters(self.unwrapped_models)  # with those of the adapters
        if self.args.check_attention:
            check = partial(check_attention, self.unwrapped_models, RankPosition.from_megatron())
            self.coordinator.all_gather_or_raise(check, "checking the attention kernels")
        self.frozen_reference = self._load_reference()

    def _prepare_peft_model(self, models: list[torch.nn.Module]) -> list[Any]:
        args = self.args
        keep_joined(self.bridge, args.model_dir)
        mark_sharded_parameters(models)  # mcore-bridge chooses the layers of adapters by the marks
        with adapter_settings_applied(), every_tensor_read(models[0].config, args.unread_tensors):
            peft_models: list[Any] = super()._prepare_peft_model(models)
            load_reference_adapter(self.bridge, models, self.settings.reference.adapter)
        check_trained(models, frozen_by=args.of(Trained).freezing)
        self._seeds_dropout = has_adapter_dropout(models)
        kernels = (args.fast_kernels, args.recompute_elementwise, args.overlap_grad_reduce)
        note = prepare_trained(models, *kernels, args.megatron_extra_kwargs)
        self._kept = keep_untrained_tensors(self.bridge, self.config, args.model_dir, args.save_missing_weights)
        for line in filter(None, (note, self._kept.note if args.saves_whole_model else None)):
            logger.info(line)
        return peft_models

    @torch.no_grad()  # the distributed optimizer's own loading of fp32 weights writes into views that need gradients
    def _load_checkpoint(self) -> None:
        with hybrid_optimizer.loading(self.optimizer, with_states=not (self.args.finetune or self.args.no_load_optim)):
            super()._load_checkpoint()

    def _load_reference(self) -> FrozenReference | None:
        """Load the frozen copy; None if the reference policy is not a copy."""
        settings, args = self.settings.reference, self.args
        if settings.beta == 0 or settings.model_dir is None:
            return None
        layout = None if settings.layout is None else ReferenceLayout(settings.layout, args.ddp_timeout // 60)
        with nullcontext() if layout is None else layout.active():
            models = get_mcore_model(args.with_reference_sizes(), self.template.config)
            for model in models:
                model.to(torch.cuda.current_device())
            if settings.in_megatron_format:
                load_mcore_checkpoint(args.for_reference_checkpoint(), models, load_arg="mcore_ref_model")
            else:
                folder = safe_snapshot_download(settings.model_dir, use_hf=args.use_hf, hub_token=args.hub_token)
                with every_tensor_read(models[0].config, args.unread_tensors):
                    models[0].config.bridge.load_weights(models, folder)
            prepare_frozen(models, args.fast_kernels)
            return FrozenReference(FrozenCopy(Passes(models, reference_engine_settings(self.settings))), layout, models)

    def merge_lora_adapters(self, adapter_name: str = "default") -> None:
        """Merge adapters while weights are exported (--merge_lora), instead of adding and subtracting them in place."""
        self._merged.enter_context(merged_on_read(self.bridge, AdaptedModules.find(self.bridge, self.unwrapped_models)))

    def unmerge_lora_adapters(self) -> None:
        self._merged.close()

    # ---- called by the parent class during training

    def setup_training(self, train_dataset: Any, val_dataset: Any) -> tuple[None, None]:
        self.setup_model_training()
        self.loop = self._build_loop(train_dataset)
        self.checkpoints = self._checkpoint_writer(train_dataset)
        if val_dataset is not None:
            self.evaluation = evaluation(self.settings, self.template, val_dataset, self.loop)
            if self.settings.evaluation.before_training and self.state.iteration == 0:
                self.evaluate(None)
        return None, None

    def _build_loop(self, train_rows: Any) -> GRPOLoop:
        config, args, rollouts_done = self.settings, self.args, self._rollouts_done
        args.check_replay_reach(rollouts_done)
        loaded = (args.mcore_adapter, args.mcore_model, *args.adapters, args.model)
        writer = JsonlWriter(os.path.join(args.output_dir, "completions.jsonl"), write_on_rank="last")
        inputs = RunInputs(
            template=self.template,
            train_rows=train_rows,
            image_reader=ImageReader(self.template) if args.most_images else None,
            rewards=self.rewards,
            servers=self.remote,
            coordinator=self.coordinator,
            stop=self.stop,
            rollouts_done=rollouts_done,
            checkpoints=tuple(path for path in loaded if path is not None) if self.state.iteration > 0 else (),
            recording=args.recording_settings(),
            write_completions=writer.append,
            is_master=is_master(),
            is_last_rank=is_last_rank(),
            logger=logger,
        )
        return assemble_loop(config, self.loaded_models(), inputs, self.state, args.train_iters)

    @property
    def _rollouts_done(self) -> int:
        trained_per_rollout = self.settings.batch.generation_batch_size * self.settings.num_iterations
        return int(self.state.consumed_train_samples // trained_per_rollout)

    def _checkpoint_writer(self, train_rows: Any) -> CheckpointWriter:
        """Compare the data with that of the checkpoint, and check that another checkpoint fits on the disk."""
        args, dataset = self.args, dataset_identity(train_rows)
        if args.resumes and self.state.iteration > 0:
            warning = compare_datasets(args.checkpoint_sources, dataset)
            if warning is not None:
                logger.warning(warning)
        model, tokenizer = model_identity(args.model_config), tokenizer_identity(self.template.tokenizer)
        identity, ranks = Identity(model, tokenizer, dataset, args.experts_in_order), _ranks_of_this_machine()
        writer = CheckpointWriter(Path(args.output_dir), self.coordinator, ranks, identity, logger.info)
        if not self.settings.recording.only:
            period = args.save_steps or args.train_iters
            next_save = (self.state.iteration // period + 1) * period
            size = saved_bytes(self.unwrapped_models, self.settings.saved, self._kept.bytes)
            writer.announce_size(min(next_save, args.train_iters), size)
        return writer

    def loaded_models(self) -> LoadedModels:
        return LoadedModels(
            wrapped=self.wrapped_models,
            unwrapped=self.unwrapped_models,
            peft=self.peft_models,
            optimizer=self.optimizer,
            scheduler=self.opt_param_scheduler,
            bridge=self.bridge,
            reference=self.frozen_reference,
        )

    def build_engine(self) -> MegatronEngine:
        return training_engine(self.settings, self.loaded_models())

    def save_checkpoint(self) -> None:
        if not (self.args.no_save_optim and self.args.save_safetensors):  # Megatron writes nothing otherwise
            end_writers_with_rank()
        assert self.loop is not None
        prompts = self._rollouts_done * self.settings.batch.rollout_prompts
        size = saved_bytes(self.unwrapped_models, self.settings.saved, self._kept.bytes)
        with self.checkpoints.writing(self.state.iteration, prompts, size):
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
        """List the checkpoints that --save_total_limit counts, in the order in which it removes them.

        Incomplete ones come first. The one that this run resumed from is not listed, so it is kept.
        """
        args = self.args
        sources = (args.mcore_model, args.mcore_adapter, *args.adapters) if args.resumes else ()
        resumed_from = {os.path.realpath(path) for path in sources if path is not None}
        checkpoints = super()._sorted_checkpoints(output_dir)
        removable = [path for path in checkpoints if os.path.realpath(path) not in resumed_from]
        return sorted(removable, key=lambda path: path == self.state.best_model_checkpoint or has_manifest(Path(path)))

    def train(self, train_dataset: Any, val_dataset: Any) -> None:
        try:
            if self.settings.recording.only:
                self._roll_out_only(train_dataset)
            else:
                super().train(train_dataset, val_dataset)
        except SharedFailure:
            self._end_early()
            raise
        finally:
            self.stop.close()
            if self.remote is not None:
                self.remote.shutdown()  # servers keep running, but cancel the requests of this run

    def _roll_out_only(self, train_dataset: Any) -> None:
        """Generate as many rollouts as training would use.

        Iterations are counted for callbacks; no checkpoint is saved because weights do not change.
        """
        self.setup_training(train_dataset, None)
        assert self.loop is not None
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
        with self.checkpoints.finishing_earlier_saves():
            goes_on: bool = super().run_train_step(train_data_iterator, val_data_iterator)
        return goes_on

    def train_step(self, train_data_iterator: None) -> tuple[list[dict[str, torch.Tensor]], float, bool]:
        assert self.loop is not None
        if self._seeds_dropout:
            seed_adapter_dropout(self.args.seed, self.state.iteration)
        self._finish_checkpoints()
        metrics = self.loop.train_step()
        grad_norm = metrics.pop("grad_norm")
        return [_tensors(metrics)], grad_norm, True

    def _end_early(self) -> None:
        """Save what was trained, after a failure that all ranks have in common. Raise StoppedBySignal after a signal.

        All ranks are at the same place and can still communicate.
        """
        if self.loop is None:  # no step has begun
            return
        folder = self._save_last_step()
        number = self.stop.agreed()
        if number is None:
            return
        self._release()
        args, step, auto = self.args, self.state.iteration, self.args.resume == "auto"
        line = last_line(number, step, args.train_iters, folder, args.has_adapter, not args.no_save_optim, auto)
        raise StoppedBySignal(self.stop, number, line)

    def _save_last_step(self) -> str | None:
        """Save a checkpoint of the last complete step, unless there is one. Return its folder; None without a step."""
        assert self.loop is not None
        step = self.state.iteration
        if self.settings.recording.only or step == self._start_iteration:
            return None
        folder = os.path.join(self.args.output_dir, f"checkpoint-{step}")
        if self.state.last_model_checkpoint != folder:
            self.loop.stages.residency.restore()
            self.save_checkpoint()
            logger.info(f"the run stops; the last complete step is saved in {folder}")
        return folder

    def evaluate(self, val_data_iterator: None) -> dict[str, Any]:
        assert self.loop is not None and self.evaluation is not None
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
        assert self.loop is not None
        self.loop.stages.watchdog.close()

    def _release(self) -> None:
        """Finish callbacks, checkpoints that are still being written, and the engine; the watchdog goes on."""
        with self.checkpoints.finishing_earlier_saves():
            super().finalize_training()
        self._finish_checkpoints()
        assert self.loop is not None
        if self.loop.stages.generation is not None:
            self.loop.stages.generation.shutdown()

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        raise TypeError("MegatronEngine runs the forward pass of this trainer")


def _ranks_of_this_machine() -> int:
    return max(int(get_dist_setting()[3]), 1)


def _tensors(metrics: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, device=torch.cuda.current_device()) for name, value in metrics.items()}

"""The class that ms-swift builds for `--rlhf_type grpo`. It assembles the stages and hands every step to loop.py;
models, optimizer, schedule, checkpoints and callbacks are its parent's."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from swift.megatron.model import get_mcore_model
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils import reduce_max_stat_across_model_parallel_group
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.template import Template
from swift.utils import JsonlWriter, get_logger, is_last_rank, is_master, safe_snapshot_download

from swift_megatron_grpo.arguments.grpo_arguments import GRPOArguments
from swift_megatron_grpo.arguments.start_up_log import start_up_lines
from swift_megatron_grpo.arguments.to_config import configure, configure_server
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.deadlines.watchdog import Watchdog
from swift_megatron_grpo.failures import SharedFailure
from swift_megatron_grpo.generation.interface import GenerationEngine
from swift_megatron_grpo.generation.local.conversations import ConversingVllm
from swift_megatron_grpo.generation.local.engine import LocalVllm, memory_to_start
from swift_megatron_grpo.generation.remote.engine import RemoteVllm
from swift_megatron_grpo.generation.remote.weight_sender import BucketTransport
from swift_megatron_grpo.grading import RewardFunctions, gym_reward
from swift_megatron_grpo.loop.completion_log import CompletionLog
from swift_megatron_grpo.loop.logprob_check import FirstRollout
from swift_megatron_grpo.loop.stages import Parts
from swift_megatron_grpo.loop.step import GRPOLoop
from swift_megatron_grpo.loop.weight_sync import CANARY_TEXT, CANARY_TOKENS, Canary, WeightSync
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.recording.dump import RolloutDump
from swift_megatron_grpo.recording.replay import RolloutReplay
from swift_megatron_grpo.training.engine import EngineSettings, MegatronEngine
from swift_megatron_grpo.training.fast_kernels import use_fast_kernels
from swift_megatron_grpo.training.megatron_fixes.expert_marks import mark_experts
from swift_megatron_grpo.training.megatron_fixes.tensor_parallel_marks import mark_sharded_parameters
from swift_megatron_grpo.training.memory.residency import Residency
from swift_megatron_grpo.training.passes import Passes
from swift_megatron_grpo.training.reference import BaseUnderAdapter, FrozenCopy, FrozenCopyInOwnLayout, Reference
from swift_megatron_grpo.training.reference_layout import ReferenceLayout
from swift_megatron_grpo.weights.export import WeightExport, merged_on_read

logger = get_logger()


class MegatronGRPOTrainer(BaseMegatronTrainer):
    args: GRPOArguments

    def __init__(self, args: GRPOArguments, template: Template, vllm_client: None = None) -> None:
        for line in start_up_lines(args):
            logger.info(line)
        functions, names = resolve_reward_funcs(args.reward_funcs, args=args)  # may fail: before the model loads
        self.coordinator = Coordinator(timedelta(seconds=args.ddp_timeout))
        self.remote = self._reach_servers(args)
        if args.grades_by_environment:
            functions, names = [*functions, gym_reward], [*names, gym_reward.__name__]
        self.settings = configure(args)
        self.rewards = RewardFunctions(names, functions, self.settings.grading.reward_weights)
        self._merged = ExitStack()
        self.loop: GRPOLoop | None = None
        self.val_prompts: PromptSource | None = None
        super().__init__(args, template)

    def _reach_servers(self, args: GRPOArguments) -> RemoteVllm | None:
        """They are asked before the model loads."""
        config = configure_server(args)
        if config is None:
            return None
        transport = BucketTransport(torch.device(torch.cuda.current_device()), config.bucket_bytes)
        remote = RemoteVllm(config, transport, self.coordinator.rank)
        environments_grade = self.coordinator.all_gather_or_raise(remote.check, "reaching the rollout servers")
        args.set_grading_of_servers(any(environments_grade))
        return remote

    # ---- what the parent asks while it builds

    def prepare_model(self) -> None:
        super().prepare_model()
        mark_sharded_parameters(self.unwrapped_models)
        self.frozen_copy, self.reference_layout, self.frozen_models = self._make_reference()

    def _prepare_peft_model(self, models: list[torch.nn.Module]) -> list[Any]:
        peft_models: list[Any] = super()._prepare_peft_model(models)
        mark_experts(models)
        if self.args.fast_kernels:
            use_fast_kernels(models, trained=True, remake=self.args.recompute_elementwise)
        return peft_models

    @torch.no_grad()  # the distributed optimizer's own loading of fp32 weights writes into views that need gradients
    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()

    def _make_reference(self) -> tuple[FrozenCopy | None, ReferenceLayout | None, list[torch.nn.Module]]:
        """A frozen copy where the reference policy is one, and what exists for its sake alone."""
        wanted, args = self.settings.reference, self.args
        if wanted.beta == 0 or wanted.model_dir is None:
            return None, None, []
        folder = safe_snapshot_download(wanted.model_dir, use_hf=args.use_hf, hub_token=args.hub_token)
        layout = None if wanted.layout is None else ReferenceLayout(wanted.layout, args.ddp_timeout // 60)
        with nullcontext() if layout is None else layout.active():
            models = get_mcore_model(args.with_reference_sizes(), self.template.config)
            for model in models:
                model.to(torch.cuda.current_device())
            models[0].config.bridge.load_weights(models, folder)
            if args.fast_kernels:
                use_fast_kernels(models, trained=False, remake=False)
            return FrozenCopy(Passes(models, self._reference_settings())), layout, models

    def merge_lora_adapters(self, adapter_name: str = "default") -> None:
        """Saving with --merge_lora: merged on the way out, instead of added to the weights and taken off again."""
        self._merged.enter_context(merged_on_read(self.bridge, self.unwrapped_models))

    def unmerge_lora_adapters(self) -> None:
        self._merged.close()

    # ---- what the parent asks while it trains

    def setup_training(self, train_dataset: Any, val_dataset: Any) -> tuple[None, None]:
        self.setup_model_training()
        self.loop = self._build_loop(train_dataset)
        self.val_prompts = None if val_dataset is None else self._prompts(val_dataset, shuffle=False)
        return None, None

    def _build_loop(self, train_dataset: Any) -> GRPOLoop:
        settings, args = self.settings, self.args
        trained_per_rollout = settings.batch.generation_batch_size * settings.num_iterations
        rollouts_done = self.state.consumed_train_samples // trained_per_rollout
        prompts_done = rollouts_done * settings.batch.rollout_prompts
        residency = Residency(
            settings.residency, self.wrapped_models, self.frozen_models, self.optimizer, tell=logger.info
        )
        args.check_replay_reach(rollouts_done)
        recording = settings.recording
        generation = None if recording.replay is not None else self.remote or self._start_vllm(residency)
        training = self.build_engine()
        export = WeightExport(self.bridge, self.unwrapped_models, adapter_alone=args.vllm_enable_lora)
        canary = self._canary()
        writer = JsonlWriter(os.path.join(args.output_dir, "completions.jsonl"), write_on_rank="last")
        parts = Parts(
            prompts=self._prompts(train_dataset, settings.data.shuffle, prompts_done),
            spare_prompts=self._prompts(train_dataset, settings.data.shuffle, spare=True),
            generation=generation,
            rewards=self.rewards,
            training=training,
            reference=self._reference(training, self.coordinator),
            residency=residency,
            sync=None
            if generation is None
            else WeightSync(settings.sync_check, generation, residency, export, canary, self.coordinator, logger),
            first_rollout=FirstRollout(training.passes, canary.passes, self.coordinator, settings.sampling),
            coordinator=self.coordinator,
            log=CompletionLog(
                settings.log, self.rewards.names, self.template.safe_decode, writer.append, is_last_rank()
            ),
            dump=None
            if recording.dump is None
            else RolloutDump(recording.dump, args.recording_settings(), rollouts_done, is_master()),
            replay=None if recording.replay is None else RolloutReplay(recording.replay),
            watchdog=self._start_watchdog(),
        )
        loop = GRPOLoop(settings, parts, self.state, self.state.iteration, args.train_iters)
        if loop.beta.adapts and self.state.iteration > 0:
            loop.beta.restore((args.mcore_adapter, args.mcore_model, *args.adapters, args.model))
        return loop

    def _start_watchdog(self) -> Watchdog:
        name = self.coordinator.all_gather(time.strftime("stuck-%Y%m%d-%H%M%S.txt"))[0]  # of this run only
        report = Path(self.args.output_dir).absolute() / name
        return Watchdog(report, self.coordinator.rank, self.coordinator.world_size, self.settings.deadlines.phase)

    def _start_vllm(self, residency: Residency) -> GenerationEngine:
        residency.make_room(memory_to_start(self.settings.vllm))
        residency.for_generation()
        vllm, turns = self.settings.vllm, self.settings.turns
        generation = LocalVllm(vllm, self.template) if turns is None else ConversingVllm(vllm, turns, self.template)
        generation.sleep()
        residency.restore()
        return generation

    def save_checkpoint(self) -> None:
        super().save_checkpoint()
        assert self.loop is not None
        if self.loop.beta.adapts and is_master():
            self.loop.beta.save(self.state.last_model_checkpoint)

    def _prompts(self, dataset: Any, shuffle: bool, taken: int = 0, spare: bool = False) -> PromptSource:
        system = self.template.template_meta.default_system
        seed, label = self.settings.data.seed, ""
        if spare:  # far from the seeds of the epochs to come
            seed, label = seed + 1_000_000, "spare-"
        return PromptSource(dataset, seed, shuffle, system, taken, label)

    def _reference(self, training: MegatronEngine, coordinator: Coordinator) -> Reference | None:
        if self.settings.reference.beta == 0:
            return None
        if self.frozen_copy is None:
            return BaseUnderAdapter(training.passes, self.peft_models)
        if self.reference_layout is None:
            return self.frozen_copy
        return FrozenCopyInOwnLayout(self.frozen_copy, self.reference_layout, coordinator)

    def _canary(self) -> Canary:
        text: list[int] = self.template.tokenizer.encode(CANARY_TEXT, add_special_tokens=False)
        server = self.settings.server
        room = self.settings.vllm.max_model_len if server is None else server.needed_length  # no server has less
        longest = min(CANARY_TOKENS, (room or CANARY_TOKENS) - 1)  # vLLM adds one
        passes = Passes(self.wrapped_models, EngineSettings(temperature=1.0, micro_batch_size=1))
        return Canary(text[:longest], passes, self.coordinator)

    def build_engine(self) -> MegatronEngine:
        return MegatronEngine(self.wrapped_models, self.optimizer, self.opt_param_scheduler, self._engine_settings())

    def _engine_settings(self) -> EngineSettings:
        packing = self.settings.packing
        return EngineSettings(
            temperature=self.settings.sampling.temperature,
            micro_batch_size=self.settings.batch.micro_batch_size,
            max_tokens=packing.max_tokens,
            infer_max_tokens=packing.infer_max_tokens,
            infer_micro_batch_size=packing.infer_micro_batch_size,
        )

    def _reference_settings(self) -> EngineSettings:
        """In a layout of its own the reference need not hold the samples that its rank trains."""
        settings = self._engine_settings()
        if self.settings.reference.layout is None:
            return settings
        if settings.max_tokens is not None or settings.infer_max_tokens is not None:
            return replace(settings, max_tokens=settings.infer_max_tokens or settings.max_tokens)
        size = settings.infer_micro_batch_size or settings.micro_batch_size
        return replace(settings, micro_batch_size=1, infer_micro_batch_size=size)

    def train(self, train_dataset: Any, val_dataset: Any) -> None:
        try:
            if self.settings.recording.only:
                self._roll_out_only(train_dataset)
            else:
                super().train(train_dataset, val_dataset)
        finally:
            if self.remote is not None:
                self.remote.shutdown()  # servers go on, but not with what nobody waits for

    def _roll_out_only(self, train_dataset: Any) -> None:
        """As many rollouts as training would take. Callbacks count iterations; no checkpoint, nothing has changed."""
        self.setup_training(train_dataset, None)
        assert self.loop is not None
        while self.state.iteration < self.args.train_iters:
            metrics = self.loop.roll_out()
            logged: dict[str, Any] = {}
            self._aggregated_metrics([_tensors(metrics)], logged)
            for _ in range(self.args.steps_per_rollout):
                self.call_event("on_step_begin")
                self.state.iteration += 1
                self.call_event("on_step_end")
            self.state.should_log = self.state.should_eval = self.state.should_save = False
            self.on_log(logs=logged)
        self.finalize_training()

    def train_step(self, train_data_iterator: None) -> tuple[list[dict[str, torch.Tensor]], float, bool]:
        assert self.loop is not None
        try:
            metrics = self.loop.step()
        except SharedFailure:
            self._save_before_stopping()
            raise
        grad_norm = reduce_max_stat_across_model_parallel_group(metrics.pop("grad_norm"))
        return [_tensors(metrics)], grad_norm, True

    def _save_before_stopping(self) -> None:
        """The last complete step, unless it was saved already."""
        assert self.loop is not None
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.iteration}")
        if self.state.iteration > 0 and self.state.last_model_checkpoint != folder:
            self.loop.parts.residency.restore()
            self.save_checkpoint()
            logger.info(f"the run stops; what it has learned so far is in {folder}")

    def evaluate(self, val_data_iterator: None) -> dict[str, Any]:
        assert self.loop is not None and self.val_prompts is not None
        per_round = self.settings.batch.train_prompts
        self.call_event("on_eval_begin")
        self.val_prompts.taken = 0
        rounds: dict[str, Any] = {}
        for _ in range(self.args.eval_iters):
            metrics = self.loop.evaluate(self.val_prompts.take(per_round), self._num_generations_eval)
            self.call_event("on_eval_step")
            self._aggregated_metrics([_tensors(metrics)], rounds)
        self.loop.parts.residency.restore()  # a checkpoint may be next
        self.on_log(logs=rounds, prefix="eval_")
        self.call_event("on_eval_end")
        return rounds

    @property
    def _num_generations_eval(self) -> int:
        return self.args.num_generations_eval or self.settings.batch.num_generations

    def finalize_training(self) -> None:
        super().finalize_training()
        assert self.loop is not None
        if self.loop.parts.generation is not None:
            self.loop.parts.generation.shutdown()
        self.loop.parts.watchdog.close()

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        raise TypeError("MegatronEngine runs the forward pass of this trainer")


def _tensors(metrics: dict[str, float]) -> dict[str, torch.Tensor]:
    """As the parent adds them up, on the device where it does."""
    return {name: torch.tensor(value, device=torch.cuda.current_device()) for name, value in metrics.items()}

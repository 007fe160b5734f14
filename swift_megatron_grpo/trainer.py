"""The class that ms-swift builds for `--rlhf_type grpo`. It assembles the stages and hands every step to loop.py;
models, optimizer, schedule, checkpoints and callbacks are its parent's."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from swift.megatron.model import get_mcore_model
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils import reduce_max_stat_across_model_parallel_group
from swift.rlhf_trainers.utils import resolve_reward_funcs
from swift.template import Template
from swift.utils import JsonlWriter, get_logger, is_last_rank, is_master, safe_snapshot_download

from swift_megatron_grpo.arguments import GRPOArguments
from swift_megatron_grpo.completion_log import CompletionLog
from swift_megatron_grpo.data.prompts import PromptSource
from swift_megatron_grpo.generation.local import LocalVllm
from swift_megatron_grpo.grading import RewardFunctions
from swift_megatron_grpo.loop import GRPOLoop, Parts
from swift_megatron_grpo.parallel import Coordinator
from swift_megatron_grpo.training.engine import EngineSettings, MegatronEngine
from swift_megatron_grpo.training.reference import BaseUnderAdapter, FrozenCopy, Reference
from swift_megatron_grpo.training.residency import Residency
from swift_megatron_grpo.training.tensor_parallel_marks import mark_sharded_parameters
from swift_megatron_grpo.weights.export import export_weights, merged_on_read

logger = get_logger()


class MegatronGRPOTrainer(BaseMegatronTrainer):
    args: GRPOArguments

    def __init__(self, args: GRPOArguments, template: Template, vllm_client: None = None) -> None:
        self.settings = args.to_config()
        for line in args.start_up_lines():
            logger.info(line)
        functions, names = resolve_reward_funcs(args.reward_funcs, args=args)  # may fail: before the model loads
        self.rewards = RewardFunctions(names, functions, self.settings.grading.reward_weights)
        self._merged = ExitStack()
        self.loop: GRPOLoop | None = None
        self.val_prompts: PromptSource | None = None
        super().__init__(args, template)

    # ---- what the parent asks while it builds

    def prepare_model(self) -> None:
        super().prepare_model()
        mark_sharded_parameters(self.unwrapped_models)
        self.reference, self.frozen_models = self._make_reference()

    def _make_reference(self) -> tuple[Reference | None, list[torch.nn.Module]]:
        """The reference policy, and the models that exist for its sake alone."""
        wanted = self.settings.reference
        if wanted.beta == 0:
            return None, []
        if wanted.model_dir is None:
            return BaseUnderAdapter(self.peft_models), []
        models = get_mcore_model(self.args, self.template.config)
        for model in models:
            model.to(torch.cuda.current_device())
        folder = safe_snapshot_download(wanted.model_dir, use_hf=self.args.use_hf, hub_token=self.args.hub_token)
        self.bridge.load_weights(models, folder)
        return FrozenCopy(models), models

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
        rollouts_done = self.state.consumed_train_samples // settings.batch.generation_batch_size
        prompts_done = rollouts_done * settings.batch.rollout_prompts
        residency = Residency(settings.residency, self.wrapped_models, self.frozen_models, self.optimizer)
        with residency.for_generation():
            generation = LocalVllm(settings.vllm, self.template)
            generation.sleep()
        writer = JsonlWriter(os.path.join(args.output_dir, "completions.jsonl"), write_on_rank="last")
        parts = Parts(
            prompts=self._prompts(train_dataset, settings.data.shuffle, prompts_done),
            spare_prompts=self._prompts(train_dataset, settings.data.shuffle, spare=True),
            generation=generation,
            rewards=self.rewards,
            training=self.build_engine(),
            reference=self.reference,
            residency=residency,
            export_weights=partial(export_weights, self.bridge, self.unwrapped_models),
            coordinator=Coordinator(timedelta(seconds=args.ddp_timeout)),
            log=CompletionLog(
                settings.log, self.rewards.names, self.template.safe_decode, writer.append, is_last_rank()
            ),
        )
        loop = GRPOLoop(settings, parts, self.state, steps_done=self.state.iteration)
        if loop.beta.adapts and self.state.iteration > 0:
            loop.beta.restore((args.mcore_adapter, args.mcore_model, *args.adapters, args.model))
        return loop

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

    def build_engine(self) -> MegatronEngine:
        batch, packing = self.settings.batch, self.settings.packing
        settings = EngineSettings(
            temperature=self.settings.sampling.temperature,
            micro_batch_size=batch.micro_batch_size,
            max_tokens=packing.max_tokens,
            infer_max_tokens=packing.infer_max_tokens,
        )
        return MegatronEngine(self.wrapped_models, self.optimizer, self.opt_param_scheduler, settings)

    def train_step(self, train_data_iterator: None) -> tuple[list[dict[str, torch.Tensor]], float, bool]:
        assert self.loop is not None
        metrics = self.loop.step()
        grad_norm = reduce_max_stat_across_model_parallel_group(metrics.pop("grad_norm"))
        return [_tensors(metrics)], grad_norm, True

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
        self.on_log(logs=rounds, prefix="eval_")
        self.call_event("on_eval_end")
        return rounds

    @property
    def _num_generations_eval(self) -> int:
        return self.args.num_generations_eval or self.settings.batch.num_generations

    def finalize_training(self) -> None:
        super().finalize_training()
        assert self.loop is not None
        self.loop.parts.generation.shutdown()

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        raise TypeError("MegatronEngine runs the forward pass of this trainer")


def _tensors(metrics: dict[str, float]) -> dict[str, torch.Tensor]:
    """As the parent adds them up, on the device where it does."""
    return {name: torch.tensor(value, device=torch.cuda.current_device()) for name, value in metrics.items()}

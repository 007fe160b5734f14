"""One optimizer step, or one forward-only pass, over a list of sequences, on whatever layout megatron was set up with.

    engine = MegatronEngine(models, optimizer, scheduler, settings)
    metrics = engine.train_step(samples, loss_func)
    values = engine.infer(samples, outputs=("logprob", "entropy"))

All ranks pass the same samples. The engine deals them to data-parallel ranks and micro batches, packs them, runs
Megatron's pipeline schedule, and sums the metrics once per step. docs/engine.md has the contract and an example.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from mcore_bridge import ModelConfig, unwrap_model
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch, collate, count
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, plan_by_tokens, refill, regroup
from swift_megatron_grpo.parallel import Parallel, sum_over_ranks
from swift_megatron_grpo.training import schedule
from swift_megatron_grpo.training.layer_losses import take_layer_losses
from swift_megatron_grpo.training.logprob import HeadSettings
from swift_megatron_grpo.training.loss import LossFunction, TokenOutput
from swift_megatron_grpo.types import Sample, TokenValues

logger = logging.getLogger(__name__)

Output = Literal["logprob", "entropy"]


class NonFiniteStep(RuntimeError):
    """The loss or a gradient was NaN or infinite. The weights are those of the step before."""


class OptimizerStepFailed(RuntimeError):
    """Megatron's optimizer refused to update."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    temperature: float  # logits are divided by it
    micro_batch_size: int = 1  # sequences in a packed micro batch, where no token budget is given
    max_tokens: int | None = None  # token budget of a packed micro batch
    infer_micro_batch_size: int | None = None  # of a forward-only pass; None for both: as in training
    infer_max_tokens: int | None = None


class MegatronEngine:
    def __init__(
        self,
        models: Sequence[MegatronModule],  # as wrapped for training (DDP), one per virtual pipeline stage
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        settings: EngineSettings,
    ) -> None:
        self.models = list(models)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.settings = settings
        self.parallel = Parallel.from_megatron()
        self.steps_done = 0
        self._config = unwrap_model(self.models)[0].config
        if self._config.calculate_per_token_loss:
            raise ValueError("calculate_per_token_loss must be false: losses come normalised over the whole step")
        self._align = Alignment.of_layout(self.parallel.tp_size, self.parallel.cp_size, self._config.sequence_parallel)
        self._flops = _flops_model(self._config)
        # Megatron's interleaved schedule takes micro batches in groups.
        self._group_size = self._config.microbatch_group_size_per_vp_stage if len(self.models) > 1 else 1
        # Megatron's rank order puts the last pipeline stage on the last rank.
        self._names_group = torch.distributed.new_group(backend="gloo") if self.parallel.pp_size > 1 else None
        self._config.finalize_model_grads_func = finalize_model_grads
        self._config.grad_scale_func = optimizer.scale_loss

    def train_step(
        self, samples: Sequence[Sample], loss_func: LossFunction, outputs: Sequence[Output] = ("logprob",)
    ) -> dict[str, float]:
        """Forward, backward, one optimizer update. Returns the loss, its metrics and grad_norm, on every rank.

        `outputs`: what the loss function reads of the model; gradients flow through both.
        """
        plan = self._plan(samples)
        self._warn_of_long(samples, plan)
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

        reduce = partial(_scaled_loss, loss_func, self._undo_megatron_mean(plan))
        with self._naming_the_step():
            shares = self._run(self.models, samples, plan, outputs, reduce, train=True)
        metrics = self._sum_metrics(shares)
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteStep(f"step {self.steps_done + 1}: the loss is {metrics['loss']}; nothing was updated")

        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise OptimizerStepFailed(f"step {self.steps_done + 1}: megatron's optimizer did not update the weights")
        self.scheduler.step(increment=len(samples))
        self.steps_done += 1
        layer_losses = take_layer_losses(self._config, plan.num_micro_batches)
        return {**metrics, **layer_losses, "grad_norm": float(grad_norm)}

    @torch.no_grad()
    def infer(
        self,
        samples: Sequence[Sample],
        outputs: Sequence[Output] = ("logprob",),
        models: Sequence[MegatronModule] | None = None,
    ) -> dict[int, TokenValues]:
        """Of the trained tokens of the samples that this data-parallel rank holds, by index of the sample.

        Complete on the last pipeline stage, where losses are computed; empty on the others. In evaluation mode.
        """
        models = self.models if models is None else list(models)
        modes = [model.training for model in models]
        for model in models:
            model.eval()
        results = self._run(models, samples, self._plan_inference(samples), outputs, _split_by_sample, train=False)
        for model, training in zip(models, modes, strict=True):
            model.train(training)
        return {index: _token_values(values) for result in results for index, values in result.items()}

    def _plan(self, samples: Sequence[Sample]) -> StepPlan:
        budget = self.settings.max_tokens
        if budget is None:
            plan = plan_by_count(len(samples), self.parallel.dp_size, self.settings.micro_batch_size)
            self._check_groups(plan.num_micro_batches)
            return plan
        lengths = [len(sample.tokens) for sample in samples]
        completions = [sum(sample.completion_mask) for sample in samples]
        return plan_by_tokens(
            lengths, self.parallel.dp_size, budget, self._flops, self._align, self._group_size, completions
        )

    def _plan_inference(self, samples: Sequence[Sample]) -> StepPlan:
        """As in training, so that results are where they will be needed; only micro batches may be larger."""
        plan, settings = self._plan(samples), self.settings
        if settings.infer_max_tokens is not None:
            lengths = [len(sample.tokens) for sample in samples]
            return refill(plan, lengths, settings.infer_max_tokens, self._flops, self._align, self._group_size)
        if settings.infer_micro_batch_size is not None:
            return regroup(plan, settings.infer_micro_batch_size, self._group_size)
        return plan

    def _check_groups(self, num_micro_batches: int) -> None:
        rest = num_micro_batches % self._group_size
        if num_micro_batches < self._group_size or 0 < rest < self.parallel.pp_size:
            raise ValueError(
                f"{num_micro_batches} micro batches on each data-parallel rank do not suit the interleaved pipeline, "
                f"which takes them in groups of {self._group_size}: use a multiple of it, or a token budget"
            )

    def _warn_of_long(self, samples: Sequence[Sample], plan: StepPlan) -> None:
        if plan.over_budget and self.parallel.rank == 0:
            longest = max(len(samples[i].tokens) for i in plan.over_budget)
            logger.warning(
                f"step {self.steps_done + 1}: {len(plan.over_budget)} completions are in micro batches beyond "
                f"--max_tokens_per_micro_batch {self.settings.max_tokens}; the longest has {longest} tokens with its "
                "prompt"
            )

    def _undo_megatron_mean(self, plan: StepPlan) -> float:
        """Megatron averages over micro batches and data-parallel ranks; our losses are shares that must be summed.

        Its schedule multiplies by CP and divides by the number of micro batches, its gradient reduction divides by
        DP * CP. Context-parallel ranks compute the same loss and each sends back the gradient of its own tokens.
        """
        return float(plan.num_micro_batches * self.parallel.dp_size)

    def _run(
        self,
        models: Sequence[MegatronModule],
        samples: Sequence[Sample],
        plan: StepPlan,
        outputs: Sequence[Output],
        reduce: schedule.Reduce,
        train: bool,
    ) -> list[Any]:
        mine, step, place = plan.of_rank(self.parallel.dp_rank), count(samples), self.parallel

        def micro_batches() -> Iterator[MicroBatch]:
            for indices in mine:
                yield collate(samples, indices, step, self._align, place.cp_rank, place.cp_size, _device())

        head = self._head(outputs)
        return schedule.run(models, micro_batches, plan.num_micro_batches, head, reduce, place, train)

    def _head(self, outputs: Sequence[Output]) -> HeadSettings:
        if "logprob" not in outputs or not set(outputs) <= {"logprob", "entropy"}:
            raise ValueError(f"outputs are ('logprob',) or ('logprob', 'entropy'), got {tuple(outputs)}")
        return HeadSettings(temperature=self.settings.temperature, entropy="entropy" in outputs)

    def _sum_metrics(self, shares: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """One reduction a step. Shares of micro batches and data-parallel ranks add up; TP and CP ranks hold copies.

        Only the last pipeline stage has shares, so only it knows the names.
        """
        names = self._metric_names(sorted(shares[0]) if shares else None)
        total = torch.zeros(len(names), dtype=torch.float64, device=_device())
        if shares:
            stacked = torch.stack([torch.stack([share[name].double() for name in names]) for share in shares])
            total = stacked.sum(0) / (self.parallel.tp_size * self.parallel.cp_size)
        return dict(zip(names, sum_over_ranks(total).tolist(), strict=True))

    def _metric_names(self, mine: list[str] | None) -> list[str]:
        if self._names_group is None:
            assert mine is not None
            return mine
        box = [mine]
        torch.distributed.broadcast_object_list(box, src=self.parallel.world_size - 1, group=self._names_group)
        assert box[0] is not None
        return box[0]

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        """Megatron finds NaN and infinite gradients before they are reduced, but does not know which step it is."""
        try:
            yield
        except RuntimeError as error:
            if "in local grad norm" not in str(error):
                raise
            raise NonFiniteStep(
                f"step {self.steps_done + 1}, rank {self.parallel.rank}: a gradient is not finite; nothing was "
                f"updated, the last checkpoint is untouched. Megatron says: {error}"
            ) from error


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())


def _flops_model(config: ModelConfig) -> FlopsModel:
    if config.num_moe_experts is None:
        width = config.ffn_hidden_size
    else:
        width = config.moe_router_topk * config.moe_ffn_hidden_size + (config.moe_shared_expert_intermediate_size or 0)
    return FlopsModel.of_transformer(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=width,
        num_attention_heads=config.num_attention_heads,
        vocab_size=config.padded_vocab_size,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        gated_linear_unit=config.gated_linear_unit,
    )


def _scaled_loss(
    loss_func: LossFunction, scale: float, batch: MicroBatch, output: TokenOutput
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, metrics = loss_func(batch, output)
    for name, value in {"loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.ndim > 0:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(
                f"the loss function returned {name} = {what}; the loss and each metric are tensors without dimensions, "
                "this micro batch's share of a value of the whole step"
            )
    return loss * scale, {**metrics, "loss": loss.detach()}


def _split_by_sample(batch: MicroBatch, output: TokenOutput) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    columns = [output.logprobs] if output.entropy is None else [output.logprobs, output.entropy]
    parts = torch.stack(columns).split(batch.counts, dim=1)  # of each sample [1 or 2, c]
    return output.logprobs.sum(), dict(zip(batch.indices, parts, strict=True))


def _token_values(columns: torch.Tensor) -> TokenValues:
    logprobs, *entropies = columns.tolist()
    return TokenValues(logprobs, entropies[0] if entropies else None)

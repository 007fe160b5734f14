"""One optimizer step, or one forward-only pass, over a list of sequences, in the layout that Megatron is set up with.

    engine = MegatronEngine(models, optimizer, scheduler, settings)
    metrics = engine.train_step(samples, loss_func)
    values = engine.infer(samples, outputs=("logprob", "entropy"))

All ranks pass the same samples. The engine assigns them to data-parallel ranks and micro batches, packs them, runs
Megatron's pipeline schedule, and sums the metrics once per step. docs/engine.md describes the interface.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch, num_completions
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.runtime.parallel import max_over_ranks, sum_over_ranks
from swift_megatron_grpo.training.draft_head import DraftHead
from swift_megatron_grpo.training.loss import LossFunction, TokenOutput
from swift_megatron_grpo.training.memory.out_of_memory import (
    MemoryAgreement,
    PeerOutOfMemory,
    agreement_of,
    free_memory,
    out_of_memory_advice,
)
from swift_megatron_grpo.training.optimizer.flat_optimizer import flat, flatten
from swift_megatron_grpo.training.passes import Output, Passes
from swift_megatron_grpo.training.planner import EngineSettings
from swift_megatron_grpo.training.trained_weights import TrainedWeights
from swift_megatron_grpo.training.upstream_fixes.linear_attention import finalize_gradients
from swift_megatron_grpo.training.upstream_fixes.routers import pop_moe_aux_losses
from swift_megatron_grpo.types import ExpertRows, Sample, TokenValues

__all__ = ["EngineSettings", "MegatronEngine", "NonFiniteStep", "NonFiniteWeights", "OptimizerStepFailed"]
logger = logging.getLogger(__name__)

_SHOWN = 5  # weights that an error names
_OPTIMIZER_MEMORY_ADVICE = (
    "shard the optimizer state over more data-parallel ranks (--use_distributed_optimizer true), or with a larger "
    "--tensor_model_parallel_size or --pipeline_model_parallel_size; with --tuner_type lora it is small"
)


class NonFiniteStep(RuntimeError):
    """The loss or a gradient was NaN or infinite. The weights are those after the previous step."""


class NonFiniteWeights(RuntimeError):
    """An update made weights NaN or infinite. Training cannot continue from them."""


class OptimizerStepFailed(RuntimeError):
    """Megatron's optimizer did not update the weights."""


class MegatronEngine:
    """Trains one model. All ranks make the same calls with the same samples."""

    def __init__(
        self,
        models: Sequence[MegatronModule],  # as wrapped for training (DDP), one per virtual pipeline stage
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        settings: EngineSettings,
        draft_head: DraftHead | None = None,  # whose weights `optimizer` updates as well
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._draft_head = draft_head
        self.passes = Passes(models, settings, draft_head)
        self.parallel = self.passes.parallel
        self._trained = TrainedWeights(self.passes.models)
        self.steps_done = 0
        self.flops_of_last_step = 0.0  # forward and backward on all ranks, without what is recomputed
        config = self.passes.config
        if config.calculate_per_token_loss:
            raise ValueError(
                "calculate_per_token_loss must be false: losses are normalised over the whole step already"
            )
        self._memory_agreement = agreement_of(self.passes.models, config, self.parallel, settings.max_tokens)
        config.finalize_model_grads_func = partial(_finalize, self._memory_agreement, draft_head)
        config.grad_scale_func = optimizer.scale_loss
        flatten(optimizer)
        # Megatron's rank order puts the last pipeline stage on the last rank.
        self._names_group = torch.distributed.new_group(backend="gloo") if self.parallel.pp_size > 1 else None

    def train_step(
        self, samples: Sequence[Sample], loss_func: LossFunction, outputs: Sequence[Output] = ("logprob",)
    ) -> dict[str, float]:
        """Run forward, backward and one optimizer update. Returns the loss, its metrics and grad_norm, on every rank.

        `outputs`: the model outputs that the loss function reads; gradients flow through both.
        """
        filled = self.passes.filled(samples).samples
        plan, shares = self._forward_backward(filled, loss_func, outputs)
        self.flops_of_last_step = self.passes.flops(filled, plan) * (1 + self._trained.passes_of_backward)
        metrics = self._sum_metrics(shares)
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteStep(f"step {self.steps_done + 1}: the loss is {metrics['loss']}; nothing was updated")

        with (
            out_of_memory_advice("the optimizer's update", self.parallel.rank, lambda: _OPTIMIZER_MEMORY_ADVICE),
            flat(self.optimizer),
        ):
            updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise OptimizerStepFailed(f"step {self.steps_done + 1}: Megatron's optimizer did not update the weights")
        self.scheduler.step(increment=num_completions(samples))
        self.steps_done += 1
        moe_aux_losses = pop_moe_aux_losses(self.passes.config, plan.num_micro_batches)
        return {**metrics, **moe_aux_losses, "grad_norm": self._finish_update(float(grad_norm))}

    def _forward_backward(
        self, samples: Sequence[Sample], loss_func: LossFunction, outputs: Sequence[Output]
    ) -> tuple[StepPlan, list[dict[str, torch.Tensor]]]:
        """Compute and reduce the gradients; again in smaller micro batches while a rank runs out of memory."""
        while True:
            plan = self.passes.plan(samples)
            self._warn_if_over_budget(samples, plan)
            for model in self.passes.models:
                model.zero_grad_buffer()
            if self._draft_head is not None:
                self._draft_head.start_step()
            self.optimizer.zero_grad()
            self._memory_agreement.start_step()
            # Losses here are shares of the step that must be summed. Megatron's schedule multiplies by CP and divides
            # by the number of micro batches; its gradient reduction divides by DP * CP. Context-parallel ranks compute
            # the same loss, and each propagates the gradient of its own tokens.
            undo_megatron_mean = float(plan.num_micro_batches * self.parallel.dp_size)
            reduce = partial(_scaled_loss, loss_func, undo_megatron_mean)
            try:
                with self._step_in_errors():
                    shares, _ = self.passes.run(samples, plan, outputs, reduce, train=True)
                if self._draft_head is not None:
                    for metrics, loss in zip(shares, self._draft_head.take_losses(), strict=True):
                        metrics["drafts/loss"] = loss
                return plan, shares
            except PeerOutOfMemory:
                if not self.passes.lower_budget(samples, train=True):
                    raise
            except torch.OutOfMemoryError:
                if not self._memory_agreement.report_failure() or not self.passes.lower_budget(samples, train=True):
                    raise
            free_memory()
            pop_moe_aux_losses(self.passes.config, plan.num_micro_batches)
            reset_model_temporary_tensors(self.passes.config, self.passes.models)  # counts of each expert's tokens

    def _finish_update(self, grad_norm: float) -> float:
        """Return the largest gradient norm; raise on all ranks if a weight is not finite. One reduction, one wait."""
        norm = torch.tensor(grad_norm, dtype=torch.float64, device=_device())
        values = torch.stack([norm, self._trained.broken(_device())])
        largest, broken = max_over_ranks(values).tolist()
        if broken:
            names: list[list[str]] = [[]] * self.parallel.world_size
            torch.distributed.all_gather_object(names, self._trained.broken_names())
            weights = list(dict.fromkeys(name for of_rank in names for name in of_rank))
            shown = ", ".join(weights[:_SHOWN]) + (f" and {len(weights) - _SHOWN} more" if weights[_SHOWN:] else "")
            raise NonFiniteWeights(
                f"step {self.steps_done}: the update made {len(weights)} weights NaN or infinite: {shown}. They were "
                "neither saved nor sent to vLLM, and earlier checkpoints are intact; continue from one with a lower "
                "--lr, or a larger --adam_eps"
            )
        return float(largest)

    def infer(
        self, samples: Sequence[Sample], outputs: Sequence[Output] = ("logprob",), temperature: float | None = None
    ) -> dict[int, TokenValues]:
        """Run forward only: see Passes.infer."""
        return self.passes.infer(samples, outputs, temperature)

    def infer_and_record(self, samples: Sequence[Sample]) -> tuple[dict[int, TokenValues], dict[int, ExpertRows]]:
        """Run forward only, and record the experts of all tokens: see Passes.infer_and_record."""
        return self.passes.infer_and_record(samples)

    def _warn_if_over_budget(self, samples: Sequence[Sample], plan: StepPlan) -> None:
        if plan.over_budget and self.parallel.rank == 0:
            longest = max(samples[i].length for i in plan.over_budget)
            logger.warning(
                f"step {self.steps_done + 1}: {len(plan.over_budget)} completions are in micro batches that exceed "
                f"--max_tokens_per_micro_batch {self.passes.settings.max_tokens}; the longest has {longest} tokens "
                "with its prompt"
            )

    def _sum_metrics(self, shares: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sum the shares of micro batches and data-parallel ranks, in one reduction; TP and CP ranks hold copies.

        Only the last pipeline stage has shares, and with them the names. Metrics named _max or _min, if any, take a
        second reduction.
        """
        names = self._metric_names(sorted(set().union(*shares)) if shares else None)
        extremes = [name for name in names if name.endswith(("_max", "_min"))]
        names = [name for name in names if name not in extremes]
        total = torch.zeros(len(names), dtype=torch.float64, device=_device())
        if shares:
            nothing = total.new_zeros(())  # micro batches of given answers have other metrics than the rest
            stacked = torch.stack(
                [torch.stack([share.get(name, nothing).double() for name in names]) for share in shares]
            )
            total = stacked.sum(0) / (self.parallel.tp_size * self.parallel.cp_size)
        summed = dict(zip(names, sum_over_ranks(total).tolist(), strict=True))
        return {**summed, **self._extreme_metrics(extremes, shares)} if extremes else summed

    def _extreme_metrics(self, names: list[str], shares: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Return the largest or smallest value over all micro batches and ranks, without metrics that had no value."""
        signs = [1.0 if name.endswith("_max") else -1.0 for name in names]
        largest = torch.full((len(names),), -math.inf, dtype=torch.float64, device=_device())
        for share in shares:
            signed = torch.stack(
                [
                    sign * share[name].double() if name in share else largest.new_tensor(-math.inf)
                    for sign, name in zip(signs, names, strict=True)
                ]
            )
            largest = torch.maximum(largest, signed)
        reduced = zip(names, signs, max_over_ranks(largest).tolist(), strict=True)
        return {name: sign * value for name, sign, value in reduced if value != -math.inf}

    def _metric_names(self, local: list[str] | None) -> list[str]:
        box = [local]
        if self._names_group is not None:
            torch.distributed.broadcast_object_list(box, src=self.parallel.world_size - 1, group=self._names_group)
        assert box[0] is not None
        return box[0]

    @contextmanager
    def _step_in_errors(self) -> Iterator[None]:
        """Add step and rank to Megatron's error about a gradient that is not finite.

        Megatron checks gradients before they are reduced, and its message has no step. It raises a plain RuntimeError,
        so only the text tells the check from another failure.
        """
        try:
            yield
        except RuntimeError as error:
            if "in local grad norm" not in str(error):
                raise
            raise NonFiniteStep(
                f"step {self.steps_done + 1}, rank {self.parallel.rank}: a gradient is not finite; nothing was "
                f"updated, the last checkpoint is untouched. Megatron's message: {error}"
            ) from error


def _finalize(
    agreement: MemoryAgreement,
    draft_head: DraftHead | None,
    models: Sequence[torch.nn.Module],
    *args: Any,
    **options: Any,
) -> None:
    agreement.before_reduction()
    finalize_gradients(models, *args, **options)
    if draft_head is not None:
        draft_head.reduce_gradients()


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())


def _scaled_loss(
    loss_func: LossFunction, scale: float, batch: MicroBatch, output: TokenOutput
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, metrics = loss_func(batch, output)
    for name, value in {"loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.ndim > 0:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(
                f"the loss function returned {name} = {what}; the loss and every metric must be tensors without "
                "dimensions: this micro batch's share of a value of the whole step"
            )
    return loss * scale, {**metrics, "loss": loss.detach()}

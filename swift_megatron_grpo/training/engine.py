"""One optimizer step, or one forward-only pass, over a list of sequences, on whatever layout megatron was set up with.

    engine = MegatronEngine(models, optimizer, scheduler, settings)
    metrics = engine.train_step(samples, loss_func)
    values = engine.infer(samples, outputs=("logprob", "entropy"))

All ranks pass the same samples. The engine deals them to data-parallel ranks and micro batches, packs them, runs
Megatron's pipeline schedule, and sums the metrics once per step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from mcore_bridge import ModelConfig, unwrap_model
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch, ModelInputs, collate, count
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, plan_by_tokens, refill
from swift_megatron_grpo.parallel import Parallel, max_over_ranks, sum_over_ranks
from swift_megatron_grpo.training.logprob import HeadSettings, gather_completion, log_prob_head
from swift_megatron_grpo.training.loss import LossFunction, TokenOutput
from swift_megatron_grpo.types import Sample, TokenValues

logger = logging.getLogger(__name__)

Output = Literal["logprob", "entropy"]
Reduce = Callable[[MicroBatch, TokenOutput], tuple[torch.Tensor, Any]]


class NonFiniteStep(RuntimeError):
    """The loss or a gradient was NaN or infinite. The weights are those of the step before."""


class OptimizerStepFailed(RuntimeError):
    """Megatron's optimizer refused to update."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    temperature: float  # logits are divided by it
    micro_batch_size: int = 1  # sequences in a packed micro batch, where no token budget is given
    max_tokens: int | None = None  # token budget of a packed micro batch
    infer_max_tokens: int | None = None  # of a forward-only pass; None: as in training


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
        self._align = Alignment.of_layout(self.parallel.tp_size, self.parallel.cp_size, self._config.sequence_parallel)
        self._flops = _flops_model(self._config)
        # Megatron's interleaved schedule takes micro batches in groups.
        self._multiple = self._config.microbatch_group_size_per_vp_stage if len(self.models) > 1 else 1
        if self._config.calculate_per_token_loss:
            raise ValueError("calculate_per_token_loss must be false: losses come normalised over the whole step")
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
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

        scale = self._undo_megatron_mean(plan)
        with self._naming_the_step():
            reduce = partial(_scaled_loss, loss_func, scale)
            shares = self._schedule(self.models, samples, plan, self._head(outputs), reduce, train=True)
        metrics = self._sum_metrics(shares)
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteStep(f"step {self.steps_done + 1}: the loss is {metrics['loss']}; nothing was updated")

        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise OptimizerStepFailed(f"step {self.steps_done + 1}: megatron's optimizer did not update the weights")
        self.scheduler.step(increment=len(samples))
        self.steps_done += 1
        return {**metrics, "grad_norm": float(grad_norm)}

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
        plan = self._plan_inference(samples)
        modes = [model.training for model in models]
        for model in models:
            model.eval()
        results = self._schedule(models, samples, plan, self._head(outputs), _split_by_sample, train=False)
        for model, training in zip(models, modes, strict=True):
            model.train(training)
        return {index: _token_values(values) for result in results for index, values in result.items()}

    def _head(self, outputs: Sequence[Output]) -> HeadSettings:
        if "logprob" not in outputs or not set(outputs) <= {"logprob", "entropy"}:
            raise ValueError(f"outputs are ('logprob',) or ('logprob', 'entropy'), got {tuple(outputs)}")
        return HeadSettings(temperature=self.settings.temperature, entropy="entropy" in outputs)

    def _plan(self, samples: Sequence[Sample]) -> StepPlan:
        budget = self.settings.max_tokens
        if budget is None:
            return plan_by_count(len(samples), self.parallel.dp_size, self.settings.micro_batch_size)
        lengths = [len(sample.tokens) for sample in samples]
        completions = [sum(sample.completion_mask) for sample in samples]
        plan = plan_by_tokens(
            lengths, self.parallel.dp_size, budget, self._flops, self._align, self._multiple, completions
        )
        if plan.over_budget and self.parallel.rank == 0:
            longest = max(lengths[i] for i in plan.over_budget)
            logger.warning(
                f"{len(plan.over_budget)} completions do not fit --max_tokens_per_micro_batch {budget} (the longest has "
                f"{longest} tokens with its prompt): their micro batches are larger"
            )
        return plan

    def _plan_inference(self, samples: Sequence[Sample]) -> StepPlan:
        """As in training, so that results are where they will be needed; only micro batches may be larger."""
        plan, budget = self._plan(samples), self.settings.infer_max_tokens
        if budget is None:
            return plan
        lengths = [len(sample.tokens) for sample in samples]
        return refill(plan, lengths, budget, self._flops, self._align, self._multiple)

    def _undo_megatron_mean(self, plan: StepPlan) -> float:
        """Megatron averages over micro batches and data-parallel ranks; our losses are shares that must be summed.

        Its schedule multiplies by CP and divides by the number of micro batches, its gradient reduction divides by
        DP * CP. Context-parallel ranks compute the same loss and each sends back the gradient of its own tokens.
        """
        return float(plan.num_micro_batches * self.parallel.dp_size)

    def _schedule(
        self,
        models: list[MegatronModule],
        samples: Sequence[Sample],
        plan: StepPlan,
        head: HeadSettings,
        reduce: Reduce,
        train: bool,
    ) -> list[Any]:
        """Megatron's forward(-backward) over this rank's micro batches; what `reduce` returned, on the last stage."""
        mine = plan.of_rank(self.parallel.dp_rank)
        step = count(samples)
        place = self.parallel

        def micro_batches() -> Iterator[MicroBatch]:
            for indices in mine:
                yield collate(samples, indices, step, self._align, place.cp_rank, place.cp_size, _device())

        def forward_step(iterator: Iterator[MicroBatch], model: MegatronModule) -> tuple[torch.Tensor, Any]:
            batch = next(iterator)
            output = _forward(model, batch.inputs, head, place)
            return output, partial(_on_completion, reduce, batch, place)

        iterators = [micro_batches() for _ in models]
        longest = max(len(sample.tokens) for sample in samples)
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=plan.num_micro_batches,
            seq_length=longest,  # shapes are exchanged per micro batch (variable_seq_lengths); no one reads this
            micro_batch_size=1,
            forward_only=not train,
        )
        return results

    def _sum_metrics(self, shares: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """One reduction a step. Shares of micro batches and data-parallel ranks add up; TP and CP ranks hold copies.

        Only the last pipeline stage has shares, so only it knows the names. Metrics named _max or _min take another
        reduction, where there are any.
        """
        names = self._metric_names(sorted(shares[0]) if shares else None)
        extremes = [name for name in names if name.endswith(("_max", "_min"))]
        names = [name for name in names if name not in extremes]
        total = torch.zeros(len(names), dtype=torch.float64, device=_device())
        if shares:
            stacked = torch.stack([torch.stack([share[name].double() for name in names]) for share in shares])
            total = stacked.sum(0) / (self.parallel.tp_size * self.parallel.cp_size)
        summed = dict(zip(names, sum_over_ranks(total).tolist(), strict=True))
        return {**summed, **self._extreme_metrics(extremes, shares)} if extremes else summed

    def _extreme_metrics(self, names: list[str], shares: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """The largest or smallest of all micro batches and ranks; left out where none had a value."""
        signs = [1.0 if name.endswith("_max") else -1.0 for name in names]
        largest = torch.full((len(names),), -math.inf, dtype=torch.float64, device=_device())
        for share in shares:
            mine = torch.stack([sign * share[name].double() for sign, name in zip(signs, names, strict=True)])
            largest = torch.maximum(largest, mine)
        found = zip(names, signs, max_over_ranks(largest).tolist(), strict=True)
        return {name: sign * value for name, sign, value in found if value != -math.inf}

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


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())


def _forward(model: MegatronModule, inputs: ModelInputs, head: HeadSettings, parallel: Parallel) -> torch.Tensor:
    """Hidden states to the next stage, or on the last one [1, k, 1] log-probs."""
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=inputs.cu_seqlens,
        cu_seqlens_kv=inputs.cu_seqlens,
        max_seqlen_q=inputs.max_seqlen,
        max_seqlen_kv=inputs.max_seqlen,
    )
    with log_prob_head(unwrap_model([model])[0], inputs, head, parallel):
        output: torch.Tensor = model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            packed_seq_params=packed,
        )
    return output


def _on_completion(
    reduce: Reduce, batch: MicroBatch, parallel: Parallel, output: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    values = gather_completion(output[0], batch.inputs, parallel)  # [m, 1 or 2]
    entropy = values[:, 1] if values.shape[1] == 2 else None
    return reduce(batch, TokenOutput(logprobs=values[:, 0], entropy=entropy))


def _scaled_loss(
    loss_func: LossFunction, scale: float, batch: MicroBatch, output: TokenOutput
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, metrics = loss_func(batch, output)
    return loss * scale, {**metrics, "loss": loss.detach()}


def _split_by_sample(batch: MicroBatch, output: TokenOutput) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    columns = [output.logprobs] if output.entropy is None else [output.logprobs, output.entropy]
    parts = torch.stack(columns).split(batch.counts, dim=1)  # of each sample [1 or 2, c]
    return output.logprobs.sum(), dict(zip(batch.indices, parts, strict=True))


def _token_values(columns: torch.Tensor) -> TokenValues:
    logprobs, *entropies = columns.tolist()
    return TokenValues(logprobs, entropies[0] if entropies else None)

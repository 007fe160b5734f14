"""Forward and backward passes over samples: assigned to ranks, packed, run through Megatron's pipeline schedule."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from mcore_bridge import ModelConfig, unwrap_model
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch, ModelInputs, collate, count
from swift_megatron_grpo.packing.filling import Filled, filled
from swift_megatron_grpo.packing.outlines import Outline
from swift_megatron_grpo.packing.plan import Alignment, StepPlan
from swift_megatron_grpo.packing.routing import ExpertLayers, layers_with_experts, routing_shape
from swift_megatron_grpo.packing.segments import lay_out
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.training.draft_head import DraftHead
from swift_megatron_grpo.training.head.logprob import gather_completion, log_prob_head
from swift_megatron_grpo.training.layers.shared_prompts import packed_params, share_prompts
from swift_megatron_grpo.training.loss import TokenOutput
from swift_megatron_grpo.training.memory.out_of_memory import (
    free_memory,
    halved,
    out_of_memory_advice,
    passes_are_independent,
    smaller_micro_batches,
)
from swift_megatron_grpo.training.moe.router_replay import PassRouters
from swift_megatron_grpo.training.planner import EngineSettings, Planner
from swift_megatron_grpo.training.stage_shapes import StageShapes
from swift_megatron_grpo.training.vision_tower import is_composite, language_model
from swift_megatron_grpo.types import ExpertRows, Sample, TokenValues

Output = Literal["logprob", "entropy"]
# Reduces the output of a micro batch to (the scalar that backward starts from, the value that the caller keeps).
Reduce = Callable[[MicroBatch, TokenOutput], tuple[torch.Tensor, Any]]
# Returns the samples with the tokens of those that this rank runs.
Fetch = Callable[[Sequence[Sample], StepPlan], Sequence[Sample]]
logger = logging.getLogger(__name__)
_PHASES = {True: "the train phase", False: "a log-prob pass"}
_LOWERED = "%s ran out of GPU memory with %s %d; it is run again with %d, which is kept and gives the same numbers"


class Passes:
    """Forward and backward passes of one model. All ranks pass the same samples."""

    def __init__(
        self, models: Sequence[MegatronModule], settings: EngineSettings, draft_head: DraftHead | None = None
    ) -> None:
        self.models = list(models)  # one per virtual pipeline stage
        self._draft_head = draft_head  # learns in passes that train
        self.parallel = RankPosition.from_megatron()
        self.config: ModelConfig = unwrap_model(self.models)[0].config
        self._align = Alignment.of_layout(self.parallel.tp_size, self.parallel.cp_size, self.config.sequence_parallel)
        self.expert_layers = _expert_layers(self.config)  # None: the model has no experts
        # Megatron's interleaved schedule processes micro batches in groups.
        self._group_size = self.config.microbatch_group_size_per_vp_stage if len(self.models) > 1 else 1
        reason = share_prompts(unwrap_model(self.models), self.parallel.cp_size, settings.share_prompts_from)
        self.reason_to_repeat_prompts = reason  # although the settings let completions share them; None: there is none
        self.settings = settings if reason is None else replace(settings, share_prompts_from=None)
        self._planner = Planner(self.config, self.parallel, self._align, self._group_size)
        self.fetch: Fetch = _here  # replaced where ranks hold the tokens of their own completions only
        self._stage_shapes = StageShapes(self.config.hidden_size, len(self.models), self._group_size)

    @property
    def fewest_samples(self) -> int:
        """Smallest number of samples that fills every rank."""
        size = self.settings.micro_batch_size if self.settings.max_tokens is None else 1
        return self.parallel.dp_size * size * self._group_size

    def filled(self, samples: Sequence[Sample]) -> Filled:
        """Add sequences that fill micro batches of a fixed size; a token budget, and steps with answers, need none."""
        fixed = self.settings.max_tokens is None and not Outline.of(samples).answers.any()
        return filled(samples, self.fewest_samples if fixed else 1)

    def plan(self, samples: Sequence[Sample]) -> StepPlan:
        """Assign samples to data-parallel ranks and micro batches."""
        return self._planner.plan(samples, self.settings)

    def flops(self, samples: Sequence[Sample], plan: StepPlan) -> float:
        """Return the FLOPs of a forward pass over these samples, on all ranks together."""
        return self._planner.flops(samples, plan, self.settings)

    def run(
        self,
        samples: Sequence[Sample],
        plan: StepPlan,
        outputs: Sequence[Output],
        reduce: Reduce,
        train: bool,
        records: bool = False,
        temperature: float | None = None,  # of completions; None: the settings'
    ) -> tuple[list[Any], PassRouters | None]:
        """Run this rank's micro batches through the model; with `train` also backward.

        Returns the values that `reduce` kept, one per micro batch, on the last pipeline stage, and [] on the others.
        Also returns the routers if samples have given experts or `records` asks for the choices.
        """
        if "logprob" not in outputs or not set(outputs) <= {"logprob", "entropy"}:
            raise ValueError(f"outputs must be ('logprob',) or ('logprob', 'entropy'), got {tuple(outputs)}")
        position = self.parallel
        assigned = plan.assignment[position.dp_rank]
        samples = self.fetch(samples, plan)
        routing = routing_shape(samples)
        routers = PassRouters(unwrap_model(self.models), position, train, records) if routing or records else None
        of_completions = self.settings.temperature if temperature is None else temperature

        pack = partial(
            collate, samples, step=count(samples), align=self._align, cp_rank=position.cp_rank,
            cp_size=position.cp_size, device=torch.device(torch.cuda.current_device()), routing=routing,
            share_prompts=plan.share_prompts,
        )  # fmt: skip

        def forward_step(iterator: Iterator[MicroBatch], model: MegatronModule) -> tuple[torch.Tensor, Any]:
            batch = next(iterator)
            # The policy has not sampled the answers of SFT, so the temperature of sampling is not theirs.
            divisor = of_completions if batch.sft_weights is None else 1.0
            head = self._draft_head if train else None
            with nullcontext() if head is None else head.learning(batch, divisor):
                output = self._forward(model, batch.inputs, divisor, "entropy" in outputs, routers)
            return output, partial(self._on_completion, reduce, batch)

        interleaved = len(self.models) > 1
        with (
            out_of_memory_advice(_PHASES[train], position.rank, partial(self._memory_advice, samples, train)),
            nullcontext() if routers is None else routers.installed(),
            self._stage_shapes.of_pass(partial(self._rows, samples, plan), train),
        ):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[map(pack, assigned) for _ in self.models] if interleaved else map(pack, assigned),
                model=self.models if interleaved else self.models[0],
                num_microbatches=plan.num_micro_batches,
                seq_length=1,  # placeholder: stage_shapes.py has the shapes of all micro batches (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=not train,
            )
        return results, routers

    def _forward(
        self,
        model: MegatronModule,
        inputs: ModelInputs,
        temperature: float,
        entropy: bool,
        routers: PassRouters | None,
    ) -> torch.Tensor:
        """Return the hidden states for the next stage; on the last one [1, k, 1 or 2] log-probs and entropies."""
        unwrapped = unwrap_model([model])[0]
        routing = nullcontext() if routers is None else routers.forward(unwrapped, inputs.routing)
        with log_prob_head(language_model(unwrapped), inputs, temperature, entropy, self.parallel), routing:
            output: torch.Tensor = model(
                input_ids=inputs.packed_ids if is_composite(unwrapped) else inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                packed_seq_params=packed_params(inputs),
                **({} if inputs.images is None else {"packed_images": inputs.images}),
            )
        return output

    def _on_completion(self, reduce: Reduce, batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Any]:
        values = gather_completion(output[0], batch.inputs, self.parallel)  # [m, 1 or 2]
        entropy = values[:, 1] if values.shape[1] == 2 else None
        return reduce(batch, TokenOutput(logprobs=values[:, 0], entropy=entropy))

    def _rows(self, samples: Sequence[Sample], plan: StepPlan) -> list[int]:
        """Return the rows of this rank's hidden states in each of its micro batches."""
        ranks = self.parallel.cp_size * (self.parallel.tp_size if self.config.sequence_parallel else 1)
        return [
            lay_out([samples[i] for i in indices], self._align, plan.share_prompts).total // ranks
            for indices in plan.assignment[self.parallel.dp_rank]
        ]

    def _memory_advice(self, samples: Sequence[Sample], train: bool) -> str:
        settings = self.settings
        longest = int(Outline.of(samples).lengths.max())
        if not train and settings.infer_max_tokens is not None:
            return smaller_micro_batches(
                "--infer_max_tokens_per_micro_batch", settings.infer_max_tokens, 0, longest, train
            )
        if not train and settings.infer_micro_batch_size is not None:
            return smaller_micro_batches("--infer_batch_size", None, settings.infer_micro_batch_size, longest, train)
        flag = "--micro_batch_size" if settings.max_tokens is None else "--max_tokens_per_micro_batch"
        return smaller_micro_batches(flag, settings.max_tokens, settings.micro_batch_size, longest, train)

    @torch.no_grad()
    def infer(
        self, samples: Sequence[Sample], outputs: Sequence[Output] = ("logprob",), temperature: float | None = None
    ) -> dict[int, TokenValues]:
        """Compute values of the trained tokens, in evaluation mode, for the samples of this data-parallel rank.

        Returns them by sample index on the last pipeline stage, where losses are computed; {} on the other stages.
        """
        all_samples = self.filled(samples)
        values = self._infer(all_samples.samples, outputs, records=False, temperature=temperature)[0]
        return all_samples.of_given(values)

    @torch.no_grad()
    def infer_and_record(self, samples: Sequence[Sample]) -> tuple[dict[int, TokenValues], dict[int, ExpertRows]]:
        """Compute log-probs as `infer` does, and record all experts by sample: see PassRouters.rows_by_sample."""
        all_samples = self.filled(samples)
        values, plan, routers = self._infer(all_samples.samples, ("logprob",), records=True)
        assert routers is not None
        assigned = plan.assignment[self.parallel.dp_rank]
        rows = routers.rows_by_sample(assigned, all_samples.samples, self._align, plan.share_prompts)
        return all_samples.of_given(values), all_samples.of_given(rows)

    def _infer(
        self, samples: Sequence[Sample], outputs: Sequence[Output], records: bool, temperature: float | None = None
    ) -> tuple[dict[int, TokenValues], StepPlan, PassRouters | None]:
        """Run forward; while memory runs out, retry with half the token budget on this rank alone."""
        modes = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        while True:
            plan = self._planner.plan_inference(samples, self.settings)
            try:
                results, routers = self.run(
                    samples, plan, outputs, _split_by_sample, train=False, records=records, temperature=temperature
                )
                break
            except torch.OutOfMemoryError:
                if not self.lower_budget(samples, train=False):
                    raise
            free_memory()
        for model, training in zip(self.models, modes, strict=True):
            model.train(training)
        values = {index: _token_values(values) for result in results for index, values in result.items()}
        return values, plan, routers

    def lower_budget(self, samples: Sequence[Sample], train: bool) -> bool:
        """Halve the token budget; return False if it cannot be lower. In training, all ranks do."""
        settings = self.settings
        budget = settings.max_tokens if train else settings.infer_max_tokens or settings.max_tokens
        smaller = None if budget is None else halved(budget, int(Outline.of(samples).lengths.max()))
        if smaller is None or not passes_are_independent(self.config, self.parallel):
            return False
        flag = "--max_tokens_per_micro_batch" if train else "--infer_max_tokens_per_micro_batch"
        if self.parallel.rank == 0 or not train:
            logger.warning(_LOWERED, _PHASES[train], flag, budget, smaller)
        if train:  # samples stay on their ranks, which have the log-probs that other passes have computed of them
            assigned = settings.assigned_max_tokens or settings.max_tokens
            self.settings = replace(settings, max_tokens=smaller, assigned_max_tokens=assigned)
        else:
            self.settings = replace(settings, infer_max_tokens=smaller)
        return True


def _here(samples: Sequence[Sample], plan: StepPlan) -> Sequence[Sample]:
    return samples


def _expert_layers(config: ModelConfig) -> ExpertLayers | None:
    if config.num_moe_experts is None:
        return None
    return ExpertLayers(
        num_layers=config.num_layers,
        with_experts=layers_with_experts(config.num_layers, config.moe_layer_freq),
        experts=config.num_moe_experts,
        k=config.moe_router_topk,
    )


def _split_by_sample(batch: MicroBatch, output: TokenOutput) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    columns = [output.logprobs] if output.entropy is None else [output.logprobs, output.entropy]
    by_sample = torch.stack(columns).split(batch.counts, dim=1)  # each [1 or 2, c]
    return output.logprobs.sum(), dict(zip(batch.indices, by_sample, strict=True))


def _token_values(columns: torch.Tensor) -> TokenValues:
    logprobs, *entropies = columns.tolist()
    return TokenValues(logprobs, entropies[0] if entropies else None)

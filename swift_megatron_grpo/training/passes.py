"""Forward and backward passes over samples: assigned to ranks, packed, run through Megatron's pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from mcore_bridge import ModelConfig, unwrap_model
from megatron.core.transformer.module import MegatronModule

from swift_megatron_grpo.packing.collate import MicroBatch, collate, count
from swift_megatron_grpo.packing.flops import DeltaNets, FlopsModel, TowerFlops
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, plan_by_tokens, refill, regroup
from swift_megatron_grpo.packing.routing import routing_shape
from swift_megatron_grpo.parallel import RankPosition
from swift_megatron_grpo.training import schedule
from swift_megatron_grpo.training.expert_layers import ExpertLayers, layers_with_experts
from swift_megatron_grpo.training.head.logprob import HeadSettings
from swift_megatron_grpo.training.loss import TokenOutput
from swift_megatron_grpo.training.memory.out_of_memory import out_of_memory_advice, smaller_micro_batches
from swift_megatron_grpo.training.recorded_routing import rows_by_sample
from swift_megatron_grpo.training.router_replay import PassRouters
from swift_megatron_grpo.types import ExpertRows, Sample, TokenValues

Output = Literal["logprob", "entropy"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Temperature and micro batch sizes."""

    temperature: float  # logits are divided by it
    micro_batch_size: int = 1  # sequences in a packed micro batch, if there is no token budget
    max_tokens: int | None = None  # token budget of a packed micro batch
    infer_micro_batch_size: int | None = None  # for forward-only passes; None for both: same as in training
    infer_max_tokens: int | None = None
    tower_share: float = 0.0  # share of a trained tower's work that a training pass has; 0: its rows are kept


class Passes:
    """Forward and backward passes of one model. All ranks pass the same samples."""

    def __init__(self, models: Sequence[MegatronModule], settings: EngineSettings) -> None:
        self.models = list(models)  # one per virtual pipeline stage
        self.settings = settings
        self.parallel = RankPosition.from_megatron()
        self.config: ModelConfig = unwrap_model(self.models)[0].config
        self._align = Alignment.of_layout(self.parallel.tp_size, self.parallel.cp_size, self.config.sequence_parallel)
        self.expert_layers = _expert_layers(self.config)  # None: the model has no experts
        self._flops = _flops_model(self.config)
        # Megatron's interleaved schedule processes micro batches in groups.
        self._group_size = self.config.microbatch_group_size_per_vp_stage if len(self.models) > 1 else 1

    @property
    def fewest_samples(self) -> int:
        """The number of samples of which every multiple gives all ranks complete micro batches."""
        size = self.settings.micro_batch_size if self.settings.max_tokens is None else 1
        return self.parallel.dp_size * size * self._group_size

    def plan(self, samples: Sequence[Sample]) -> StepPlan:
        """Assign samples to data-parallel ranks and micro batches."""
        budget = self.settings.max_tokens
        if budget is None:
            plan = plan_by_count(len(samples), self.parallel.dp_size, self.settings.micro_batch_size)
            self._check_groups(plan.num_micro_batches)
            return plan
        lengths = [len(sample.tokens) for sample in samples]
        completions = [sum(sample.completion_mask) for sample in samples]
        images = self._image_work(samples)
        return plan_by_tokens(
            lengths, self.parallel.dp_size, budget, self._flops, self._align, self._group_size, completions, images
        )

    def _image_work(self, samples: Sequence[Sample]) -> list[float] | None:
        """Return the FLOPs of the images of each sample, as if it did not share them with others of its micro batch."""
        share = self.settings.tower_share
        if share == 0 or not any(sample.pictures for sample in samples):
            return None
        tower = _tower_flops(self.config.hf_config.vision_config)
        return [share * sum(tower.of_image(prod(p.picture.grid)) for p in sample.pictures) for sample in samples]

    def run(
        self,
        samples: Sequence[Sample],
        plan: StepPlan,
        outputs: Sequence[Output],
        reduce: schedule.Reduce,
        train: bool,
        records: bool = False,
    ) -> tuple[list[Any], PassRouters | None]:
        """Run this rank's micro batches through the model; with `train` also backward.

        Experts of samples with a given routing are those. Returns the values that `reduce` kept, one per micro batch,
        on the last pipeline stage, and [] on the other stages; and the routers, if their choices were given or
        recorded (`records`).
        """
        if "logprob" not in outputs or not set(outputs) <= {"logprob", "entropy"}:
            raise ValueError(f"outputs must be ('logprob',) or ('logprob', 'entropy'), got {tuple(outputs)}")
        head = HeadSettings(temperature=self.settings.temperature, entropy="entropy" in outputs)
        assigned, step, position = plan.of_rank(self.parallel.dp_rank), count(samples), self.parallel
        device, routing = torch.device(torch.cuda.current_device()), routing_shape(samples)
        routers = PassRouters(unwrap_model(self.models), position, train, records) if routing or records else None

        def micro_batches() -> Iterator[MicroBatch]:
            for indices in assigned:
                yield collate(samples, indices, step, self._align, position.cp_rank, position.cp_size, device, routing)

        with (
            out_of_memory_advice(
                "the train phase" if train else "a log-prob pass", position.rank, self._memory_advice(samples, train)
            ),
            nullcontext() if routers is None else routers.installed(),
        ):
            results = schedule.run(
                self.models, micro_batches, plan.num_micro_batches, head, reduce, position, train, routers
            )
        return results, routers

    def _memory_advice(self, samples: Sequence[Sample], train: bool) -> str:
        settings, longest = self.settings, max(len(sample.tokens) for sample in samples)
        if not train and settings.infer_max_tokens is not None:
            return smaller_micro_batches(
                "--infer_max_tokens_per_micro_batch", settings.infer_max_tokens, 0, longest, train
            )
        if not train and settings.infer_micro_batch_size is not None:
            return smaller_micro_batches("--infer_batch_size", None, settings.infer_micro_batch_size, longest, train)
        flag = "--micro_batch_size" if settings.max_tokens is None else "--max_tokens_per_micro_batch"
        return smaller_micro_batches(flag, settings.max_tokens, settings.micro_batch_size, longest, train)

    @torch.no_grad()
    def infer(self, samples: Sequence[Sample], outputs: Sequence[Output] = ("logprob",)) -> dict[int, TokenValues]:
        """Compute values of the trained tokens, in evaluation mode, for the samples of this data-parallel rank.

        Returns them by sample index on the last pipeline stage, where losses are computed; {} on the other stages.
        """
        values, _ = self._infer(samples, self._plan_inference(samples), outputs, records=False)
        return values

    @torch.no_grad()
    def infer_and_record(self, samples: Sequence[Sample]) -> tuple[dict[int, TokenValues], dict[int, ExpertRows]]:
        """Compute log-probs as `infer` does, and record the experts of all tokens by sample index.

        The rows [t, layers, k] of this data-parallel rank's samples are on every rank, with -1 in the layers of other
        pipeline stages. {} on a stage without experts.
        """
        plan, position = self._plan_inference(samples), self.parallel
        values, routers = self._infer(samples, plan, ("logprob",), records=True)
        assert routers is not None
        rows = rows_by_sample(
            routers.choices,
            plan.of_rank(position.dp_rank),
            [len(sample.tokens) for sample in samples],
            self._align,
            self.config.sequence_parallel,
            self.config.num_layers,
            position,
        )
        return values, rows

    def _infer(
        self, samples: Sequence[Sample], plan: StepPlan, outputs: Sequence[Output], records: bool
    ) -> tuple[dict[int, TokenValues], PassRouters | None]:
        modes = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        results, routers = self.run(samples, plan, outputs, _split_by_sample, train=False, records=records)
        for model, training in zip(self.models, modes, strict=True):
            model.train(training)
        return {index: _token_values(values) for result in results for index, values in result.items()}, routers

    def _plan_inference(self, samples: Sequence[Sample]) -> StepPlan:
        """Plan forward-only micro batches. Samples stay on the ranks that train them, which need the results."""
        plan, settings = self.plan(samples), self.settings
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
                f"{num_micro_batches} micro batches per data-parallel rank do not fit the interleaved pipeline "
                f"schedule, which processes them in groups of {self._group_size}: use a multiple of that number, or a "
                "token budget (--max_tokens_per_micro_batch)"
            )


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
        delta_nets=_delta_nets(config),
    )


def _expert_layers(config: ModelConfig) -> ExpertLayers | None:
    if config.num_moe_experts is None:
        return None
    layers = layers_with_experts(config.num_layers, config.moe_layer_freq)
    return ExpertLayers(config.num_layers, layers, config.num_moe_experts, config.moe_router_topk)


def _tower_flops(vision: Any) -> TowerFlops:
    """Return the FLOPs of a tower, by its config of transformers."""
    windows = hasattr(vision, "fullatt_block_indexes")  # Qwen2.5-VL: in all other layers
    hidden = vision.embed_dim if hasattr(vision, "embed_dim") else vision.hidden_size  # Qwen2-VL
    return TowerFlops(
        layers=vision.depth,
        full_layers=len(vision.fullatt_block_indexes) if windows else vision.depth,
        hidden_size=hidden,
        ffn_hidden_size=int(hidden * vision.mlp_ratio) if hasattr(vision, "mlp_ratio") else vision.intermediate_size,
        window=(vision.window_size // vision.patch_size) ** 2 if windows else 0,
    )


def _delta_nets(config: ModelConfig) -> DeltaNets | None:
    """Return the sizes of the layers with linear attention; None: every layer has softmax attention."""
    if config.experimental_attention_variant != "gated_delta_net":
        return None
    return DeltaNets(
        sum(map(bool, config.linear_attention_freq)),
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


def _split_by_sample(batch: MicroBatch, output: TokenOutput) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    columns = [output.logprobs] if output.entropy is None else [output.logprobs, output.entropy]
    by_sample = torch.stack(columns).split(batch.counts, dim=1)  # each [1 or 2, c]
    return output.logprobs.sum(), dict(zip(batch.indices, by_sample, strict=True))


def _token_values(columns: torch.Tensor) -> TokenValues:
    logprobs, *entropies = columns.tolist()
    return TokenValues(logprobs, entropies[0] if entropies else None)

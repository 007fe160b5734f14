"""Plans of one model's passes: which data-parallel rank runs which sample in which micro batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from mcore_bridge import ModelConfig

from swift_megatron_grpo.packing.arrays import pick
from swift_megatron_grpo.packing.bins import Floats
from swift_megatron_grpo.packing.bundles import SampleWork, plan_within, shared_if_worth_it
from swift_megatron_grpo.packing.flops import DeltaNets, FlopsModel, VisionTowerFlops
from swift_megatron_grpo.packing.outlines import Outline
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, plan_by_count, refill, regroup
from swift_megatron_grpo.packing.routing import layers_with_experts
from swift_megatron_grpo.packing.segments import shared_with_previous
from swift_megatron_grpo.runtime.parallel import RankPosition
from swift_megatron_grpo.training.vision_tower import thinker_config
from swift_megatron_grpo.types import ModelImage, Sample


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Temperature and micro batch sizes."""

    temperature: float  # logits are divided by it
    micro_batch_size: int = 1  # sequences in a packed micro batch, if there is no token budget
    max_tokens: int | None = None  # token budget of a packed micro batch
    assigned_max_tokens: int | None = None  # the budget that assigns samples to ranks; None: max_tokens, never lowered
    infer_micro_batch_size: int | None = None  # for forward-only passes; None for both: same as in training
    infer_max_tokens: int | None = None
    # Share of the work that one copy of each prompt must save; below, prompts are repeated. None: always repeated.
    share_prompts_from: float | None = None
    vision_tower_share: float = 0.0  # share of its work that a training pass has; 0: its rows are kept


class Planner:
    """Plans micro batches. All ranks compute the same plan."""

    def __init__(self, config: ModelConfig, parallel: RankPosition, align: Alignment, group_size: int) -> None:
        self._config = config
        self._parallel = parallel
        self._align = align
        self._flops = _flops_model(config)
        self._group_size = group_size  # micro batches that Megatron's interleaved schedule processes together

    def plan(self, samples: Sequence[Sample], settings: EngineSettings) -> StepPlan:
        """Plan completions, and the answers that follow them, in micro batches of their own."""
        number = int(np.count_nonzero(~Outline.of(samples).answers))
        completions, answers = samples[:number], samples[number:]
        plan = self._plan(completions, settings)
        if not answers:
            return plan
        size = len(answers) * settings.micro_batch_size // len(completions)  # in as many micro batches
        of_answers = replace(settings, micro_batch_size=size, share_prompts_from=None)
        joined = plan.followed_by(self._plan(answers, of_answers), first=len(completions))
        self._check_micro_batches(joined.num_micro_batches)
        return joined

    def _plan(self, samples: Sequence[Sample], settings: EngineSettings) -> StepPlan:
        if settings.max_tokens is not None:
            budget = settings.assigned_max_tokens or settings.max_tokens
            plan = self._plan_within(budget, samples, self._parallel.dp_size, self._group_size, settings)
            is_lowered = settings.max_tokens < budget
            return self._refilled(plan, settings.max_tokens, samples, settings) if is_lowered else plan
        plan = plan_by_count(len(samples), self._parallel.dp_size, settings.micro_batch_size)
        self._check_micro_batches(plan.num_micro_batches)
        share_from = settings.share_prompts_from
        if share_from is None:
            return plan
        return shared_if_worth_it(plan, self._work(samples, settings), share_from)

    def plan_inference(self, samples: Sequence[Sample], settings: EngineSettings) -> StepPlan:
        """Plan forward-only micro batches. Samples stay on the ranks that train them, which need the results."""
        plan = self.plan(samples, settings)
        if settings.infer_max_tokens is not None:
            return self._refilled(plan, settings.infer_max_tokens, samples, settings, train=False)
        if settings.infer_micro_batch_size is not None:
            return regroup(plan, settings.infer_micro_batch_size, self._group_size)
        return plan

    def _refilled(
        self, plan: StepPlan, budget: int, samples: Sequence[Sample], settings: EngineSettings, train: bool = True
    ) -> StepPlan:
        """Plan with another budget. Samples stay on their ranks, which have log-probs of them."""
        shares = settings if plan.share_prompts else replace(settings, share_prompts_from=None)

        def fill(indices: Sequence[int], multiple: int) -> StepPlan:
            chosen = pick(samples, np.array(indices, np.int64))
            return self._plan_within(budget, chosen, ranks=1, multiple=multiple, settings=shares, train=train)

        return refill(plan, fill, self._group_size)

    def flops(self, samples: Sequence[Sample], plan: StepPlan, settings: EngineSettings) -> float:
        """Return the FLOPs of one forward pass over the samples of a step; prompts that a plan shares count once."""
        work = self._work(samples, settings if plan.share_prompts else replace(settings, share_prompts_from=None))
        return float(work.flops(work.groups()).sum())

    def _plan_within(
        self,
        budget: int,
        samples: Sequence[Sample],
        ranks: int,
        multiple: int,
        settings: EngineSettings,
        train: bool = True,
    ) -> StepPlan:
        work = self._work(samples, settings)
        if not train:
            work = replace(work, completions=work.lengths, images=None)
        return plan_within(budget, work, ranks, self._align, multiple, settings.share_prompts_from)

    def _work(self, samples: Sequence[Sample], settings: EngineSettings) -> SampleWork:
        outline = Outline.of(samples)
        images = self._image_work(samples, settings.vision_tower_share)
        shares = settings.share_prompts_from is not None
        shared = shared_with_previous(samples) if shares else np.zeros_like(outline.lengths)
        return SampleWork(outline.lengths, outline.trained, images, self._flops, shared)

    def _image_work(self, samples: Sequence[Sample], share: float) -> Floats | None:
        """Return the FLOPs of the images of each sample, as if it did not share them with others of its micro batch."""
        if share == 0 or not any(sample.images for sample in samples):
            return None
        vision_tower = _vision_tower_flops(thinker_config(self._config.hf_config).vision_config)
        images = [[p.image for p in sample.images if isinstance(p.image, ModelImage)] for sample in samples]
        shown = [[image.grid for image in of_sample] for of_sample in images]
        # A tile attends to itself alone, and an image without tiles is one.
        return np.array(
            [share * sum(tiles * vision_tower.of_image(prod(patches)) for tiles, *patches in grids) for grids in shown]
        )

    def _check_micro_batches(self, number: int) -> None:
        rest = number % self._group_size
        if number < self._group_size or 0 < rest < self._parallel.pp_size:
            raise ValueError(
                f"{number} micro batches per data-parallel rank do not fit the interleaved pipeline "
                f"schedule, which processes them in groups of {self._group_size}: use a multiple of that number, or a "
                "token budget (--max_tokens_per_micro_batch)"
            )


def _flops_model(config: ModelConfig) -> FlopsModel:
    experts: dict[str, int] = {}
    if config.num_moe_experts is not None:
        width = config.moe_router_topk * config.moe_ffn_hidden_size + (config.moe_shared_expert_intermediate_size or 0)
        layers = layers_with_experts(config.num_layers, config.moe_layer_freq)
        experts = {"expert_layers": len(layers), "experts_width": width}
    return FlopsModel.of_transformer(
        num_layers=config.num_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.ffn_hidden_size or 0,
        num_attention_heads=config.num_attention_heads, vocab_size=config.padded_vocab_size,
        num_query_groups=config.num_query_groups, kv_channels=config.kv_channels,
        gated_linear_unit=config.gated_linear_unit, delta_nets=_delta_nets(config), **experts,
    )  # fmt: skip


def _vision_tower_flops(vision: Any) -> VisionTowerFlops:
    """Return the FLOPs of a vision tower, by its config of transformers."""
    windows = hasattr(vision, "fullatt_block_indexes")  # Qwen2.5-VL: in all other layers
    hidden = vision.embed_dim if hasattr(vision, "embed_dim") else vision.hidden_size  # Qwen2-VL
    layers = vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers  # InternVL
    if hasattr(vision, "mlp_ratio"):  # Qwen2-VL
        width = int(hidden * vision.mlp_ratio)
    else:
        width = vision.out_hidden_size if vision.model_type.startswith("glm4v") else vision.intermediate_size
    return VisionTowerFlops(
        layers=layers, full_layers=len(vision.fullatt_block_indexes) if windows else layers, hidden_size=hidden,
        ffn_hidden_size=width, window=(vision.window_size // vision.patch_size) ** 2 if windows else 0,
    )  # fmt: skip


def _delta_nets(config: ModelConfig) -> DeltaNets | None:
    """Return the sizes of the layers with linear attention; None: every layer has softmax attention."""
    if config.experimental_attention_variant != "gated_delta_net":
        return None
    return DeltaNets(
        sum(map(bool, config.linear_attention_freq)), config.linear_num_key_heads, config.linear_num_value_heads,
        config.linear_key_head_dim, config.linear_value_head_dim,
    )  # fmt: skip

"""The reference policy: a frozen copy of the model in full tuning, the model without its adapter in LoRA."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from swift_megatron_grpo.settings.adapter import Adapter
from swift_megatron_grpo.settings.batches import Batches
from swift_megatron_grpo.settings.flag import AtLeast, Faults, Flags, Range, flag, rule
from swift_megatron_grpo.settings.layout import Layout, ModelShape
from swift_megatron_grpo.settings.parallel import faults_of_layout
from swift_megatron_grpo.settings.teacher import Teacher


class Reference(Flags):
    """The source of the reference, and the layout of a copy: a size that is left out is as in training."""

    ref_tensor_model_parallel_size: int | None = flag(
        None,
        "Tensor-parallel size of frozen copies, which need less memory than the trained model: of the reference (full "
        "tuning with --beta above 0) and of --teacher_model. Every --ref_..._parallel_size flag that is omitted takes "
        "the size of training. Default: as in training.",
    )
    ref_pipeline_model_parallel_size: int | None = flag(
        None, "Pipeline-parallel size of the frozen reference copy. Default: as in training."
    )
    ref_context_parallel_size: int | None = flag(
        None, "Context-parallel size of the frozen reference copy. Default: as in training."
    )
    ref_expert_model_parallel_size: int | None = flag(
        None, "Expert-parallel size of the frozen reference copy. Default: as in training."
    )
    ref_expert_tensor_parallel_size: int | None = flag(
        None, "Expert-tensor-parallel size of the frozen reference copy. Default: as in training."
    )
    model: str | None
    ref_model: str | None
    mcore_ref_model: str | None
    beta: float | None
    trained: Adapter
    ref_adapters: list[str]
    sync_ref_model: bool
    ref_model_sync_steps: Annotated[int, AtLeast(1, use=512)]
    ref_model_mixup_alpha: Annotated[
        float, Range(0, 0.6, high=1, above_low=True, why="it is the policy's share in the new reference")
    ]
    batches: Batches
    teacher: Teacher

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are set, under the names of training's."""
        sizes = {name: value for name, value in vars(self).items() if name.startswith("ref_") and "parallel" in name}
        return {name.removeprefix("ref_"): size for name, size in sizes.items() if size is not None}

    @property
    def model_dir(self) -> str | None:
        """The weights of the frozen copy, a folder or a hub id; None: there is no copy."""
        if self.beta == 0 or self.trained.exists:
            return None
        return self.mcore_ref_model or self.ref_model or self.model

    @property
    def is_teacher(self) -> bool:
        """True if the frozen copy is the teacher as well."""
        return self.teacher.is_copy and self.teacher.name == self.model_dir and not self.sync_ref_model

    @property
    def adapter(self) -> str | None:
        """The folder of the reference's adapter."""
        return self.ref_adapters[0] if self.beta != 0 and self.ref_adapters else None

    def layout(self, training: Layout) -> Layout | None:
        """Return the layout of the copy; None: as in training."""
        if not self.sizes:
            return None
        layout = replace(training, **self.sizes)  # type: ignore[arg-type]
        same_stages = layout.pipeline_model_parallel_size == training.pipeline_model_parallel_size
        return replace(
            layout,
            virtual_pipeline_model_parallel_size=1,
            microbatch_group_size_per_vp_stage=None,
            stages=None,
            sequence_parallel=layout.tensor_model_parallel_size > 1,
            first_stage_layers=training.first_stage_layers if same_stages else None,
            last_stage_layers=training.last_stage_layers if same_stages else None,
        )

    @rule
    def the_copy_is_of_one_checkpoint(self) -> Faults:
        if self.ref_model is not None and self.trained.exists:
            yield "--ref_model: the reference of a LoRA run is the model without its adapter; leave it out"
        if self.mcore_ref_model is not None and (self.trained.exists or self.ref_model is not None):
            reason = "the reference is the frozen copy of a run without an adapter, from one checkpoint"
            yield f"--mcore_ref_model {self.mcore_ref_model}: {reason}; leave it or the other flag out"

    @rule
    def a_moving_reference_is_a_copy(self) -> Faults:
        if not self.sync_ref_model:
            return
        if self.model_dir is None:
            why = "--beta is 0" if self.beta == 0 else "that of a LoRA run is the model without its adapter"
            yield f"--sync_ref_model true moves the frozen copy of the reference, and {why}; leave it out"
        elif self.sizes:
            sizes = " ".join(f"--ref_{size} {value}" for size, value in self.sizes.items())
            yield (
                f"--sync_ref_model true with {sizes}: policy and reference are mixed where they are, in one layout; "
                "leave one of them out"
            )

    @rule
    def sizes_are_of_a_copy_and_divide_the_batches(self, layout: Layout) -> Faults:
        copy = self.layout(layout)
        if copy is None:
            return
        if (self.beta == 0 or self.trained.exists) and not self.teacher.is_copy:
            lora = "the reference of a LoRA run is the model without its adapter"
            yield (
                "the --ref_..._parallel_size flags need a frozen reference copy or a --teacher_model, and "
                f"{lora if self.trained.exists else '--beta is 0'}; leave them out"
            )
        for size, value in self.sizes.items():
            if value <= 0:
                yield f"--ref_{size} {value} must be at least 1; use --ref_{size} 1, or leave it out"
        if copy.is_positive:
            replace(self.batches, micro_batch_size=1).sizes(copy)

    @rule
    def the_model_can_be_divided(self, layout: Layout, shape: ModelShape) -> Faults:
        copy = self.layout(layout)
        if copy is not None:
            for fault in faults_of_layout(copy, shape):
                yield f"the reference copy (--ref_...): {fault}"

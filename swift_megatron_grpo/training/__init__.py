"""Forward and backward passes of the policy and the reference policy, on any Megatron layout.

    engine.py            MegatronEngine: train_step and infer over a list of samples
    planner.py           which rank runs which sample in which micro batch
    passes.py            runs micro batches
    schedule.py          Megatron's pipeline schedule over packed micro batches
    stage_shapes.py      what pipeline stages send each other, from the plan instead of a message before each tensor
    preparation.py       what is changed in models that are loaded
    vision_tower.py      the language model of a composite model, and a guard in front of its vision tower
    reference.py         the reference policy: a frozen copy, or the base under a LoRA adapter
    reference_layout.py  a second parallel layout of the same ranks, for the frozen copy
    trained_weights.py   refuses a model of which nothing is trained, and finds weights that are not finite
    checkpoint_size.py   estimate of the bytes of a checkpoint, before it is written
    head/                hidden states to log-probs and entropies
    loss/                the losses
    memory/              offloading, recomputation, advice for out-of-memory errors
    moe/                 experts: dispatch, grouped products, given and recorded routing
    layers/              layers in fewer or faster kernels
    optimizer/           the optimizer step
    upstream_fixes/      corrections of upstream errors

Tests: tests/unit/training, tests/dist, and on GPUs tests/gpu.
"""

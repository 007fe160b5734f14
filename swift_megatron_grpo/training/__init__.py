"""Forward and backward passes of the policy and the reference policy, on any Megatron layout.

    engine.py            MegatronEngine: train_step and infer over a list of samples
    planner.py           which rank runs which sample in which micro batch
    passes.py            runs packed micro batches through Megatron's pipeline schedule
    stage_shapes.py      what pipeline stages send each other, from the plan instead of a message before each tensor
    draft_head.py        a layer of multi-token prediction that learns with the policy, for drafts
    preparation.py       what is changed in models that are loaded
    vision_tower.py      the language model of a composite model, and a guard in front of its vision tower
    reference.py         the reference policy: a frozen copy, in its own layout if need be, or LoRA's base
    trained_weights.py   refuses a model of which nothing is trained, gathers weights, finds those that are not finite
    head/                hidden states to log-probs and entropies
    loss/                the losses
    memory/              offloading, smaller budgets and advice where memory runs out
    moe/                 experts: dispatch, grouped products, given and recorded routing
    layers/              layers in fewer or faster kernels, recomputation
    optimizer/           the optimizer step
    upstream_fixes/      corrections of upstream errors

Tests: tests/unit/training, tests/dist, and on GPUs tests/gpu.
"""

"""Forward and backward passes of the policy and the reference policy, on any Megatron layout.

    engine.py            MegatronEngine: train_step and infer over a list of samples
    planning.py          which rank runs which sample in which micro batch
    passes.py            runs micro batches
    schedule.py          Megatron's pipeline schedule over packed micro batches
    stage_shapes.py      what pipeline stages send each other, from the plan instead of a message before each tensor
    shared_prompts.py    attention of completions that share one copy of their prompt
    torch_attention.py   torch's flash kernel, where Transformer Engine has none
    expert_layers.py     the layers of a model that have experts
    expert_chunks.py     skips sorting tokens by expert where they arrive sorted
    row_dispatch.py      sends a token's row once to each rank that has some of its experts
    router_replay.py     routers that weigh given experts instead of choosing, and record what they choose
    recorded_routing.py  recorded experts of parallel ranks as rows of whole samples
    attention_check.py   attention kernels against exact arithmetic, before training (--check_attention)
    preparation.py       what is changed in models that are loaded
    towers.py            the language model of a composite model, and a guard in front of its tower
    reference.py         the reference policy: a frozen copy, or the base under a LoRA adapter
    reference_layout.py  a second parallel layout of the same ranks, for the frozen copy
    parameter_gather.py  weights that are updated but not gathered yet (--overlap_param_gather)
    trained_weights.py   refuses a model of which nothing is trained, and finds weights that are not finite
    checkpoint_size.py   estimate of the bytes of a checkpoint, before it is written
    fast_kernels.py      faster kernels for the same arithmetic (--fast_kernels)
    grouped_experts.py   one kernel per product for all experts of a layer
    adapter_layers.py    linear layers to which adapters add inside the matrix products
    rms_norm.py          Transformer Engine's RMSNorm kernels, called directly
    weighted_swiglu.py   SwiGLU of experts, weighted by probabilities, as Triton kernels
    head/                hidden states to log-probs and entropies
    loss/                the losses
    memory/              offloading, recomputation, advice for out-of-memory errors
    megatron_fixes/      corrections of upstream errors

Tests: tests/unit/training, tests/dist, and on GPUs tests/gpu.
"""

"""Corrections of what megatron-core, mcore-bridge and Transformer Engine get wrong, one file each.

    adapter_settings.py       --use_rslora and --lora_dropout
    expert_marks.py           gradients of experts without expert parallelism
    tensor_parallel_marks.py  the gradient norm with tensor parallelism
    gradient_clipping.py      clipping with Transformer Engine's kernels
    many_tensors.py           adapters of experts, which are more tensors than Transformer Engine takes in one call
    linear_attention.py       two gradients of gated delta nets with tensor parallelism
    linear_attention_context.py  context parallelism of gated delta nets
    router_bias.py            the expert bias, which moves without a learning rate
    hybrid_optimizer.py       weights that are loaded after --optimizer_cpu_offload has copied them
    moe_aux_losses.py         values of the losses that MoE layers add
    result_queue.py           a helper process of checkpoint writing that outlives its rank

Each file names the versions and the test that fails once upstream is fixed. A correction changes nothing where upstream
is right already; docs/versions.md has the table. Tests: tests/unit/training/megatron_fixes.
"""

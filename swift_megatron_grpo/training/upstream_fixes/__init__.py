"""Corrections of what megatron-core, mcore-bridge and Transformer Engine get wrong, by subject.

    adapter_settings.py      --use_rslora and --lora_dropout
    marks.py                 gradients of experts without expert parallelism, the gradient norm with tensor parallelism
    multi_tensor_kernels.py  Transformer Engine's kernels in an optimizer step, for any number of tensors
    linear_attention.py      gated delta nets: gradients with tensor parallelism, context parallelism, waits for the GPU
    routers.py               the expert bias, which moves without a learning rate; losses that MoE layers add
    hybrid_optimizer.py      weights that are loaded after --optimizer_cpu_offload has copied them
    sgd.py                   SGD, whose saved state could not be loaded
    resumed_schedule.py      learning rates and weight decay of a run that resumes, which are those of its flags
    result_queue.py          a helper process of checkpoint writing that outlives its rank

Each file names the versions and the test that fails once upstream is fixed. A correction changes nothing where upstream
is right already; docs/versions.md has the table. Tests: tests/unit/training/upstream_fixes.
"""

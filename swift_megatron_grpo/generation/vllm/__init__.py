"""Code for vLLM that runs in the trainer's processes (colocate) and in a rollout server's workers.

    sampling.py       requests for completions and for log-probs of a text
    adapter.py        loads a LoRA adapter from tensors
    rollout_engine.py  ms-swift's engine, for the media and the log-probs of rollouts
    images.py         whether an engine holds the vision tower of its model, and the tokens of an image
    deepstack.py      mends what vLLM does with deepstack features without an image tower, and after a sleep
    fast_logprobs.py  log-probs of sampled tokens with less work on the GPU and on the host
    logprob_kernel.py  their Triton kernel
    position_noise.py  samples seeded requests with noise of their seed and position
    verification.py   accepts a draft where it is the sample of its position
    predicted_drafts.py  drafts of the model's own layers of multi-token prediction
    drafts.py         drafts for running requests, and the completions of earlier rollouts
    second_runner.py  drafts in vLLM's second model runner: installs what follows, chooses between both runners
    device_drafts.py  the same drafts on the device, from vLLM's own rows and from completions that have ended
    draft_kernel.py   their Triton kernels
    kept_texts.py     completions that have ended, in a ring on the device
    texts.py          texts that share a prompt, and the draft of their longest match
    fast_schedule.py  vLLM's schedule of a step in which every running request gets one token
    fast_outputs.py   appends the tokens of a step to their requests, and passes them on in batches; installs both
    known_scheduler.py  the versions and settings of vLLM in which both make the same changes as vLLM
    engine_kwargs.py  reads flags in JSON; refuses settings of vLLM that change the policy, or that a flag sets
    batch_invariance.py  turns on vLLM's kernels whose results do not depend on the batch
    model_packages.py  packages that ms-swift imports to load a model
    triton_cache.py   one cache of Triton, whether vLLM compiles its graph or loads it
    cuda_runtime.py   lets vLLM and FlashInfer find the CUDA runtime next to tilelang

Tests: tests/unit/generation/vllm, tests/unit/loop/test_weight_sync.py (loaded_weights), tests/e2e/test_generation.py,
tests/e2e/test_server.py.
"""

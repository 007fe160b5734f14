"""Code for vLLM that runs in the trainer's processes (colocate) and in a rollout server's workers.

    sampling.py       requests for completions and for log-probs of a text
    adapter.py        loads a LoRA adapter from tensors
    towers.py         whether an engine holds the image, video and audio parts of its model
    load_tracer.py    traces a load of weights, to read back what the model holds
    direct_load.py    writes sent tensors into the places that a traced load has shown
    fast_logprobs.py  log-probs of sampled tokens with less work on the GPU and on the host
    logprob_kernel.py  their Triton kernel
    engine_kwargs.py  the support of every setting of vLLM in --vllm_engine_kwargs
    json_flags.py     reads flags whose value is a JSON object
    cuda_runtime.py   lets vLLM and FlashInfer find the CUDA runtime beside tilelang

Tests: tests/unit/vllm_shared, tests/unit/loop/test_weight_sync.py (load_tracer), tests/e2e/test_generation.py,
tests/e2e/test_server.py.
"""

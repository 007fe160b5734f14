"""Tensors into the parameters of vLLM, in the trainer's processes (colocate) and in a server's workers.

loaded_weights.py       load weights, and read back what the model holds
load_tracer.py          trace a load: which slice of which tensor is copied to which place
quantization.py         the settings of --rollout_quantization in vLLM, and its checks
staging.py              the weights of a layer that quantizes, until all of them have arrived
prediction_layers.py    a model with its layers of multi-token prediction, as one
online_layers.py        vLLM's layers that quantize, all experts of a layer in one call

Tests: tests/unit/weights/load, tests/unit/loop/test_weight_sync.py, tests/e2e/test_quantized_rollouts.py.
"""

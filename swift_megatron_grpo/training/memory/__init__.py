"""GPU memory of the trainer.

    residency.py              decides which parts of the trainer's state are on the GPU in which phase
    offload.py                copies groups of storages to the host and back
    storages.py               finds the storages of parameters, gradients and optimizer state
    recompute_elementwise.py  drops cheap activations and recomputes them in backward
    out_of_memory.py          runs a pass again with half the token budget, or names the flag to change

Tests: tests/unit/training/memory, tests/dist/test_offloading.py, tests/gpu/test_residency.py.
"""

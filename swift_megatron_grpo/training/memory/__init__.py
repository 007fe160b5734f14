"""GPU memory of the trainer.

residency.py      decides which parts of the trainer's state are on the GPU in which phase
offload.py        finds storages of weights, gradients and optimizer state, copies them to the host and back
out_of_memory.py  runs a pass again with half the token budget, or names the flag to change
"""

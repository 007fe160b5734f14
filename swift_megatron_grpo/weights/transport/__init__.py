"""Tensors from the trainer to the workers of a server. Needs torch and numpy only.

buckets.py          pack many tensors into one flat tensor
channel.py          a process group that carries weights to the workers of one server
rendezvous.py       admit processes that have a secret, and share the keys of their stores
held_weights.py     what an engine reports of the weights that it holds
checksums.py        checksums of tensors, and of slices of them
checksum_kernel.py  the same numbers for many tensors at once, on a GPU

Tests: tests/unit/weights/transport, tests/unit/loop/test_weight_sync.py.
"""

"""Assigns samples to ranks and micro batches, and packs a micro batch into tensors. No padding between sequences.

    plan.py     which rank trains which sample in which micro batch (pure Python)
    flops.py    the cost of a sequence, for equal work on all ranks (pure Python)
    media.py    images of a micro batch, and positions on three axes
    routing.py  given experts of a micro batch, and recorded ones by sample
    collate.py  samples of a micro batch to the tensors of a packed forward pass

Tests: tests/unit/packing.
"""

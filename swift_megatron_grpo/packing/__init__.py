"""Assigns samples to ranks and micro batches, and packs a micro batch into tensors. No padding between sequences.

plan.py      which rank trains which sample in which micro batch
bundles.py   the same for prompts that are shared within groups
completions.py  completions that stay on their ranks as arrays, and objects of those that a rank needs
outlines.py  samples as arrays of integers, and objects of those that a rank needs
arrays.py    columns of equal length, and objects that are made when read: picked from and joined together
bins.py      bins of one size on several ranks: the arithmetic of both
flops.py     the cost of a sequence, for equal work on all ranks
segments.py  the order of tokens in a micro batch: sequences, or prompts and their completions
images.py    images of a micro batch, and positions on three axes
routing.py   given experts of a micro batch, and recorded ones by sample
expert_rows.py  rows of experts as compressed JSON, and back within bounds
filling.py   sequences that fill micro batches of a fixed size
collate.py   samples of a micro batch to the tensors of a packed forward pass
"""

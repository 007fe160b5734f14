"""Manifests of checkpoints: complete or refused, undamaged or refused, and of the same model, tokenizer and data.

manifest.py   manifest.json: every file of a checkpoint with its size and checksum; model, tokenizer and dataset
saving.py     surrounds a save: free space before it, the manifest after it, and the errors of a full disk
newest.py     the checkpoint that a run continues from (--resume)
sources.py    the checkpoints that a run loads: quick checks, checksums on all ranks, and what replaces a damaged one

Described in docs/checkpoints.md. Tests: tests/unit/output/checkpoints, tests/e2e/test_checkpoints.py, test_resume.py.
"""

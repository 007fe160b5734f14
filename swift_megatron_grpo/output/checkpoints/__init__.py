"""Manifests of checkpoints: complete or refused, undamaged or refused, and of the same model, tokenizer and data.

manifest.py   manifest.json: every file of a checkpoint with its size and checksum, and what the run trained
identity.py   identities of model, tokenizer and dataset, and how two of them differ
saving.py     surrounds a save: free space before it, the manifest after it, and the errors of a full disk
newest.py     the checkpoint that a run continues from (--resume)
sources.py    the checkpoints that a run loads: quick checks, and the whole checkpoint that replaces a damaged one
verifying.py  checksums of the checkpoints that a run loads, in parallel on all ranks

Described in docs/checkpoints.md. Tests: tests/unit/output/checkpoints, tests/e2e/test_checkpoints.py, test_resume.py.
"""

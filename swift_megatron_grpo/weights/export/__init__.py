"""The weights of Megatron under the names of the checkpoint.

unread_tensors.py      refuse checkpoints with tensors that nothing loads
kept_tensors.py        tensors that are not trained, by their names, and that are saved as they were
joined_projections.py  matrices that are one tensor in the checkpoint, exported as one
export.py              weights under checkpoint names, with LoRA merged, or the adapter alone
host_flags.py          export a layer without waiting for the GPU per weight

Tests: tests/unit/weights/export, tests/dist/test_lora_export.py, tests/dist/test_unread_tensors.py.
"""

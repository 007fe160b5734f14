"""The weights of Megatron under the names of the checkpoint.

unread_tensors.py      refuse checkpoints with tensors that nothing loads
kept_tensors.py        what is not trained and saved as it was: tensors, by their names, and generation_config.json
joined_projections.py  matrices that are one tensor in the checkpoint, exported as one
prediction_layers.py   layers of multi-token prediction, as they are stored
export.py              weights under checkpoint names, with LoRA merged, or the adapter alone
host_flags.py          export a layer without waiting for the GPU per weight

Tests: tests/unit/weights/export, tests/dist/test_lora_export.py, tests/dist/test_unread_tensors.py.
"""

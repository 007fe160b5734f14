"""The weights on their way from a checkpoint, and to an inference engine.

    unread_tensors.py  refuses checkpoints with tensors that nothing loads
    tensor_names.py    which part of a model a tensor belongs to
    kept_tensors.py    tensors that are not trained, and that are saved as they were
    joined_projections.py  matrices that are one tensor in the checkpoint, exported as one
    export.py          weights under checkpoint names, with LoRA merged, or the adapter alone
    adapter_merge.py   frozen weights plus the product of an adapter
    host_flags.py      exports a layer without waiting for the GPU per weight
    verify.py          compares what was sent with what an engine holds and computes

Tests: tests/unit/weights, tests/unit/loop/test_weight_sync.py, tests/e2e/test_sync_check.py, and in tests/dist
test_lora_export.py and test_unread_tensors.py.
"""

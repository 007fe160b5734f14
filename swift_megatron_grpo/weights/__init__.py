"""The trained weights on their way to an inference engine.

    export.py  weights under checkpoint names, with LoRA merged, or the adapter alone
    verify.py  compares what was sent with what an engine holds and computes

Tests: tests/unit/loop/test_weight_sync.py, tests/dist/test_lora_export.py, tests/e2e/test_sync_check.py.
"""

"""The weights on their way from a checkpoint through Megatron to an inference engine, and the proof that they arrived.

export/             read a checkpoint, export trained weights under its names
transport/          tensors in buckets, from the trainer to the workers of a server
load/               load tensors into vLLM, and trace where each went
verify.py           compare what was sent with what an engine holds and computes
stacked_tensors.py  tensors that are evenly spaced in one memory, as one tensor
stored_tensors.py   shapes and sizes of a checkpoint's tensors, from the headers of its files

Tests: tests/unit/weights, tests/unit/loop/test_weight_sync.py, tests/e2e/test_sync_check.py, and in tests/dist
test_lora_export.py and test_unread_tensors.py.
"""

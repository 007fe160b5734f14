"""Platforms other than NVIDIA GPUs.

cpu/  stand-ins for torch.cuda and Transformer Engine, and fixes of upstream packages, on a machine without a GPU

Tests: tests/unit/platforms; on several ranks: tests/dist/test_cpu_platform_*.py.
"""

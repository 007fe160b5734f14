"""Handle what a machine has: platforms other than NVIDIA GPUs, and packages with kernels.

attention_packages.py  whether flash attention is installed
cpu/                   stand-ins for torch.cuda and Transformer Engine, and fixes of upstream packages, without a GPU

Tests: tests/unit/platforms; on several ranks: tests/dist/test_cpu_platform_*.py.
"""

"""Inductor points Triton's cache to a folder of its own, unless the variable is set: what triton_cache.py prevents."""

from __future__ import annotations

import os

import pytest
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from swift_megatron_grpo.generation.vllm.triton_cache import set_triton_cache


def test_inductor_has_another_cache_only_if_the_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the function sets is undone
    monkeypatch.delenv("TRITON_CACHE_DIR")
    default = os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    assert triton_cache_dir(0) != default
    set_triton_cache()
    assert triton_cache_dir(0) == default

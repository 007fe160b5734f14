"""Triton's cache is its default one, unless a user has chosen another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swift_megatron_grpo.generation.vllm.triton_cache import set_triton_cache


@pytest.mark.parametrize(("given", "expected"), [(None, ".triton/cache"), ("mine", "mine")])
def test_the_cache_is_tritons_default_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / (given or "")))
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    if given is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    set_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / expected)


def test_a_home_that_cannot_be_written_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "absent"))
    set_triton_cache()
    assert "TRITON_CACHE_DIR" not in os.environ

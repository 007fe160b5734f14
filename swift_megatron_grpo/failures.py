"""Failures of several ranks at once."""

from __future__ import annotations


class RankFailure(RuntimeError):
    """Another rank failed in a step that all ranks take together."""


class SharedFailure(RuntimeError):
    """What failed is of all ranks. Each of them raises it, so each may still take part in saving a checkpoint."""

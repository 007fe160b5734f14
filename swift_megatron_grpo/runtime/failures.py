"""Failures of several ranks at once."""

from __future__ import annotations


class RankFailure(RuntimeError):
    """Another rank failed in a step that all ranks perform together."""


class SharedFailure(RuntimeError):
    """A failure common to all ranks: every rank raises it, so all can still join in saving a checkpoint."""

"""Phrases that the messages of several checks share."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any


def typed_value(value: Any) -> str:
    """Return a flag's value as a user types it on the command line."""
    if isinstance(value, list):
        return " ".join(typed_value(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return value.name if isinstance(value, Enum) else str(value)


def use_flag(flag: str, values: Iterable[Any]) -> str:
    """Return the advice to set a flag to one of these values."""
    return f"use --{flag} {' or '.join(map(typed_value, values))}"

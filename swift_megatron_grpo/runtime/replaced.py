"""Replaces an attribute of an object, a class or a module for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute inside the context. An attribute that the owner only inherits is inherited again afterwards."""
    is_own = name in vars(owner)
    before = vars(owner)[name] if is_own else None
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

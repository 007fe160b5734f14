"""Replaces an attribute of an object, a class or a module: for a while, or a function for good."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


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


def wrap(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that replaces one of an owner, for good. Its first argument is the replaced function."""
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(owner, name, wraps(original)(lambda *args, **kwargs: function(original, *args, **kwargs)))
        return function

    return replace

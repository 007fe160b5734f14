"""Refusals: what the stand-in knows of Transformer Engine and does not do. For the other files of this folder."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(owner: str, **arguments: Any) -> None:
    """Raise for the first argument that asks for something. Not asking is None, False or an empty value."""
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(
                f"{owner}({name}={value!r}) is not implemented on the CPU platform (real Transformer Engine needs CUDA)"
            )


def unsupported_function(module: str, name: str) -> Any:
    """A function that exists for `from ... import` and raises when it is called."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_not_available(module, name))

    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    return function


def unsupported_class(module: str, name: str) -> type:
    """A class that exists for imports, base classes and isinstance, and raises when it is instantiated."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_not_available(module, name))

    return type(name, (), {"__init__": __init__, "__module__": module})


def _not_available(module: str, name: str) -> str:
    return f"{module}.{name} is not implemented on the CPU platform (real Transformer Engine needs CUDA)"

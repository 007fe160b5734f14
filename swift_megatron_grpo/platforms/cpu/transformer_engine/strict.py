"""Errors for the parts of Transformer Engine that the stand-in does not implement."""

from __future__ import annotations

from typing import Any, NoReturn


def reject_unsupported(owner: str, **arguments: Any) -> None:
    """Raise NotImplementedError for the first argument that is set, that is, not None, False or empty."""
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(
                f"{owner}({name}={value!r}) is not implemented on the CPU platform (real Transformer Engine needs CUDA)"
            )


def unsupported_function(module: str, name: str) -> Any:
    """Create a function that can be imported and raises when it is called."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_unsupported_message(module, name))

    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    return function


def unsupported_class(module: str, name: str) -> type:
    """Create a class for imports, base classes and isinstance that raises when it is instantiated."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_unsupported_message(module, name))

    return type(name, (), {"__init__": __init__, "__module__": module})


def _unsupported_message(module: str, name: str) -> str:
    return f"{module}.{name} is not implemented on the CPU platform (real Transformer Engine needs CUDA)"

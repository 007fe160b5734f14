"""Module trees that stand in for packages that need CUDA, and errors for what they do not implement."""

from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

NEEDS_CUDA = "the real package needs CUDA"


def module_tree(root: ModuleType, contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Return the root and its submodules, of the same type, by full name; `contents`: names by path below the root."""
    modules = {root.__name__: as_package(root)}
    for path, names in contents.items():
        module = as_package(type(root)(f"{root.__name__}.{path}"))
        vars(module).update(names)
        modules[module.__name__] = module
        parent, _, leaf = module.__name__.rpartition(".")
        setattr(modules[parent], leaf, module)
    return modules


def as_package(module: ModuleType) -> ModuleType:
    """Mark the module as a package, so that its submodules can be imported."""
    module.__path__ = []
    module.__spec__ = ModuleSpec(module.__name__, loader=None, is_package=True)
    return module


def reject_unsupported(owner: str, **arguments: object) -> None:
    """Raise NotImplementedError for the first argument that is set, that is, not None, False, 0 or empty."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            raise NotImplementedError(_unsupported_message(f"{owner}({name}=a tensor of shape {list(value.shape)})"))
        if value:
            raise NotImplementedError(_unsupported_message(f"{owner}({name}={value!r})"))


def unsupported(module: str, name: str) -> type:
    """Create a class or function that raises when it is called. It can be imported, a base class and in isinstance."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_unsupported_message(f"{module}.{name}"))

    return type(name, (), {"__init__": __init__, "__module__": module})


def _unsupported_message(what: str) -> str:
    return f"{what} is not implemented on the CPU platform ({NEEDS_CUDA})"

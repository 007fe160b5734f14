"""Call functions just before or right after a module executes, regardless of who imports it and when.

One finder on sys.meta_path looks the name up in two dictionaries and returns None for every other module. Register
before the import begins: registering for a module that is already executing raises, so no callback is silently missed.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType
from typing import Any

Callbacks = dict[str, list[Callable[[ModuleType], object]]]  # by name of the module
_before: Callbacks = {}
_after: Callbacks = {}
_lock = Lock()  # guards the dictionaries and sys.meta_path; never held while foreign code runs


def before_import(module_name: str, callback: Callable[[], None]) -> None:
    """Call `callback()` once, just before the module executes. Raises RuntimeError if it has begun to execute."""
    with _lock:
        if module_name in sys.modules:
            raise RuntimeError(f"{module_name} is already imported, so no callback can run before it")
        _register(_before, module_name, lambda _: callback())


def after_import(module_name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call `callback(module)` once, right after the module has executed; immediately if it already has."""
    with _lock:
        module = sys.modules.get(module_name)
        if module is None:
            _register(_after, module_name, callback)
            return
    # A module without a spec was put into sys.modules by hand, complete. importlib marks the spec while it executes.
    spec: Any = module.__spec__
    if spec is not None and spec._initializing:
        raise RuntimeError(f"{module_name} is being imported at this moment: register the callback earlier")
    callback(module)


def give_name(module_name: str, name: str, value: Any) -> None:
    """Give the module a global of this name before it executes, such as one that hides a builtin; or now, if it has."""
    with _lock:
        module = sys.modules.get(module_name)
        if module is None:
            _register(_before, module_name, lambda executing: setattr(executing, name, value))
            return
    setattr(module, name, value)


def _register(callbacks: Callbacks, module_name: str, callback: Callable[[ModuleType], object]) -> None:
    callbacks.setdefault(module_name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _before and name not in _after:
            return None
        for finder in tuple(sys.meta_path):
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:  # a namespace package has nothing to execute
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """The real loader with callbacks around exec_module. It restores the real loader before the module executes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, get_resource_reader, ...
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        with _lock:
            before = _before.pop(spec.name, [])
        for callback in before:
            callback(module)
        self._loader.exec_module(module)
        with _lock:
            after = _after.pop(spec.name, [])
        for callback in after:
            # A module may replace its entry in sys.modules while it executes: ms-swift's lazy packages do.
            callback(sys.modules[spec.name])


_finder = _Finder()

"""Callbacks around the execution of a module, with real modules in a temporary folder."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_megatron_grpo.runtime import import_hooks
from swift_megatron_grpo.runtime.import_hooks import after_import, before_import, give_name

Make = Callable[[str], str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(source) writes a module with a unique name and returns the name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(source: str) -> str:
        name = f"hooked_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_callbacks_run_before_and_after_the_execution(make: Make) -> None:
    events: list[str] = []
    name = make("import builtins; builtins._hook_events.append('executed'); value = 1")
    import builtins

    builtins._hook_events = events  # type: ignore[attr-defined]
    try:
        before_import(name, lambda: events.append("before"))
        after_import(name, lambda module: events.append(f"after, value {module.value}"))
        importlib.import_module(name)
    finally:
        del builtins._hook_events  # type: ignore[attr-defined]
    assert events == ["before", "executed", "after, value 1"]


def test_a_callback_before_a_module_may_import_others(make: Make) -> None:
    dependency = make("ready = False")
    name = make(f"import {dependency}; seen = {dependency}.ready")

    def prepare() -> None:
        importlib.import_module(dependency).ready = True  # type: ignore[attr-defined]

    before_import(name, prepare)
    assert importlib.import_module(name).seen is True


def test_a_callback_before_an_imported_module_is_refused(make: Make) -> None:
    name = make("")
    importlib.import_module(name)
    with pytest.raises(RuntimeError, match=f"{name} is already imported"):
        before_import(name, lambda: None)


def test_a_callback_after_an_imported_module_runs_at_once(make: Make) -> None:
    name = make("value = 2")
    module = importlib.import_module(name)
    seen: list[object] = []
    after_import(name, seen.append)
    assert seen == [module]


def test_a_callback_after_an_executing_module_is_refused(make: Make) -> None:
    name = make(
        """
        from swift_megatron_grpo.runtime.import_hooks import after_import
        try:
            after_import(__name__, print)
        except RuntimeError as error:
            refusal = str(error)
        """
    )
    assert "is being imported at this moment" in importlib.import_module(name).refusal


def test_each_callback_runs_once_and_in_order(make: Make) -> None:
    name = make("")
    calls: list[int] = []
    after_import(name, lambda _: calls.append(1))
    after_import(name, lambda _: calls.append(2))
    importlib.reload(importlib.import_module(name))
    assert calls == [1, 2]


def test_a_callback_receives_the_object_that_replaced_its_module(make: Make) -> None:
    name = make(
        """
        import sys, types
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                return f"resolved {name}"
        lazy = Lazy(__name__)
        lazy.__spec__ = __spec__
        sys.modules[__name__] = lazy
        """
    )
    seen: list[str] = []
    after_import(name, lambda module: seen.append(module.anything))
    module = importlib.import_module(name)
    assert seen == ["resolved anything"]
    assert module.anything == "resolved anything"


def test_a_lazy_package_of_ms_swift_can_be_hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swift")
    package = tmp_path / f"lazy_{uuid.uuid4().hex}"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import sys
            from swift.utils.import_utils import _LazyModule
            sys.modules[__name__] = _LazyModule(
                __name__, globals()['__file__'], {'inner': ['Thing']}, module_spec=__spec__, extra_objects={})
            """
        )
    )
    (package / "inner.py").write_text("class Thing: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[object] = []
    after_import(package.name, lambda module: seen.append(module.Thing))  # imports the submodule from inside the hook
    module = importlib.import_module(package.name)
    assert seen == [module.Thing]
    assert type(module).__name__ == "_LazyModule"


def test_a_failed_import_keeps_its_callback_for_the_next_attempt(make: Make, tmp_path: Path) -> None:
    name = make("raise ValueError('first try')")
    seen: list[str] = []
    after_import(name, lambda module: seen.append(module.value))
    with pytest.raises(ValueError, match="first try"):
        importlib.import_module(name)
    assert seen == []
    (tmp_path / f"{name}.py").write_text("value = 'second try, longer'")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert seen == ["second try, longer"]


def test_a_callback_that_fails_fails_the_import(make: Make) -> None:
    name = make("")

    def fail() -> None:
        raise LookupError("no platform")

    before_import(name, fail)
    with pytest.raises(LookupError, match="no platform"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_a_hooked_module_has_the_usual_loader_and_source(make: Make) -> None:
    name = make("def function():\n    return 1\n")
    after_import(name, lambda _: None)
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None and spec.origin is not None
    assert "return 1" in spec.loader.get_source(name)  # type: ignore[attr-defined]  # through the wrapper
    module = importlib.import_module(name)
    plain = importlib.import_module(make(""))
    assert type(module.__loader__) is type(plain.__loader__)
    assert type(module.__spec__.loader) is type(plain.__spec__.loader)
    assert "return 1" in inspect.getsource(module.function)


def test_the_finder_ignores_other_modules(make: Make) -> None:
    after_import(make(""), lambda _: None)
    assert import_hooks._finder in sys.meta_path
    assert import_hooks._finder.find_spec("a_name_that_is_not_registered") is None
    assert sys.meta_path.count(import_hooks._finder) == 1


def test_concurrent_imports_run_each_callback_once(make: Make) -> None:
    name = make("import time; time.sleep(0.05)")
    calls: list[str] = []
    before_import(name, lambda: calls.append("before"))
    after_import(name, lambda _: calls.append("after"))
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        importlib.import_module(name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert calls == ["before", "after"]


# ---- names


def test_a_module_executes_with_the_names_that_it_was_given(make: Make) -> None:
    name = make("found = open('x')")
    give_name(name, "open", lambda path: f"{path} from outside")
    assert importlib.import_module(name).found == "x from outside"


def test_a_name_is_given_at_once_if_the_module_is_imported(make: Make) -> None:
    module = importlib.import_module(make("def read(): return open('x')"))
    give_name(module.__name__, "open", lambda path: f"{path} from outside")
    assert module.read() == "x from outside"

"""Prepare every test process: megatron can be imported with or without a GPU."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.forking.client import sockets_folder

# Seconds of each file in the last run with --store-durations. The longest start first, so that no worker is left alone
# with one of them at the end; files that are not listed, because they are new or quick, start last.
DURATIONS = Path(__file__).with_name("durations.json")
_QUICK = 1.0  # seconds; files that take less are not listed


def pytest_configure(config: pytest.Config) -> None:
    sockets_folder()  # before xdist starts its workers, which then share the fork servers
    if not config.getoption("tx", None) or hasattr(config, "workerinput"):
        prepare_for_tests()  # a process that only waits for workers saves its imports
    if config.getoption("store_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder(config))


def prepare_for_tests() -> None:
    import torch
    from hypothesis import settings

    # No deadline, because the machine may be busy. Most properties have parameters as well, which share the examples.
    settings.register_profile("patient", deadline=None, max_examples=30)
    settings.load_profile("patient")
    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from scanning thousands of tests, and all that they import, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone", choices=("yes", "no"), help="run only tests that are marked `alone`, or only the others"
    )
    parser.addoption(
        "--longest-file", type=float, help="leave out unit and contract tests of files that took more seconds"
    )
    parser.addoption("--without-nightly", action="store_true", help="leave out tests that are marked `nightly`")
    parser.addoption(
        "--short", action="store_true", help="leave out `nightly` and `thorough` tests, and most cases in dist and e2e"
    )
    parser.addoption("--store-durations", action="store_true", help="write durations.json after folders have passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and apply --alone, --longest-file, --without-nightly and --short."""
    durations = {DURATIONS.parent / name: seconds for name, seconds in json.loads(DURATIONS.read_text()).items()}
    items.sort(key=lambda item: -durations.get(item.path, 0.0))
    kept = list(items)
    if choice := config.getoption("--alone"):
        kept = [item for item in kept if (item.get_closest_marker("alone") is not None) == (choice == "yes")]
    if longest := config.getoption("--longest-file"):
        slow = {path for path, seconds in durations.items() if seconds > longest}
        kept = [item for item in kept if item.path not in slow or _stage(item) not in ("unit", "contract")]
    if config.getoption("--without-nightly") or config.getoption("--short"):
        kept = [item for item in kept if not item.get_closest_marker("nightly")]
    if config.getoption("--short"):
        kept = _some_cases([item for item in kept if not item.get_closest_marker("thorough")])
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _stage(item: pytest.Item) -> str:
    return item.path.relative_to(DURATIONS.parent).parts[0]


def _some_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep the first case and the last of each test in dist and e2e; cases are listed by kind."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _stage(item) in ("dist", "e2e"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for of_test in cases.values() for item in of_test[1:-1]}
    return [item for item in items if item not in left_out]


class DurationRecorder:
    """Adds up the seconds of each file and merges them into durations.json if all tests of the folders passed."""

    def __init__(self, config: pytest.Config) -> None:
        # otherwise files may have run in part
        in_part = config.option.keyword or config.option.without_nightly or config.option.short
        self.complete = not in_part and all(Path(argument).is_dir() for argument in config.args)
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file.removeprefix("tests/")] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK or not self.complete:
            return
        known = json.loads(DURATIONS.read_text()) | self.seconds
        kept = {
            name: round(seconds, 1)
            for name, seconds in sorted(known.items(), key=lambda entry: -entry[1])
            if seconds >= _QUICK and (DURATIONS.parent / name).exists()
        }
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")

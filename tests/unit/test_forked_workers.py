"""A test that ends its worker fails by name, also if a process that the worker has started lives on."""

from __future__ import annotations

import re
from pathlib import Path

from tests.forking.client import python

CRASH = """
import os, signal, time

def test_crash():
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crashed_worker_is_reported_while_its_child_lives(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(CRASH)
    worker = ("--tx", "popen//python=python -m tests.forking.worker", "--dist", "load", "--max-worker-restart", "0")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), *worker)
    assert done.returncode == 1, done.stdout
    assert re.search("crashed while running '.*test_crash.py::test_crash'", done.stdout), done.stdout

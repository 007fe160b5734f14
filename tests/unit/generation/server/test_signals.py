"""No process of the engine ends at SIGINT by itself, whether vLLM forks or spawns it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import IMPORT_PATH

# Like vLLM's core: it ends at SIGINT, and starts a process of its own, which does the same. It has no coordinator.
_CORE = """
import multiprocessing, os, signal

def interrupt(name):
    def end(number, frame):
        raise SystemExit(3)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is end
    print(name, "continues", flush=True)

class EngineCoreProc:
    @staticmethod
    def run_engine_core(method, name):
        from vllm.v1.executor.multiproc_executor import WorkerProc
        interrupt("core")
        worker = multiprocessing.get_context(method).Process(target=WorkerProc.worker_main, kwargs={"name": name})
        worker.start()
        worker.join()
        raise SystemExit(worker.exitcode)
"""
_EXECUTOR = """
from vllm.v1.engine.core import interrupt

class WorkerProc:
    @staticmethod
    def worker_main(name):
        interrupt(name)
"""
_SERVER = """
import multiprocessing, sys
from swift_megatron_grpo.generation.server.signals import ignore_interrupts

if __name__ == "__main__":
    ignore_interrupts()
    ignore_interrupts()
    from vllm.v1.engine.core import EngineCoreProc
    method = sys.argv[1]
    core = multiprocessing.get_context(method).Process(target=EngineCoreProc.run_engine_core, args=(method, "worker"))
    core.start()
    core.join()
    raise SystemExit(core.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_engine_and_its_workers_ignore_interrupts(method: str, tmp_path: Path) -> None:
    for name, code in (
        ("__init__.py", ""),
        ("v1/engine/core.py", _CORE),
        ("v1/executor/multiproc_executor.py", _EXECUTOR),
    ):
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    (tmp_path / "server.py").write_text(_SERVER)
    run = subprocess.run([sys.executable, "server.py", method], cwd=tmp_path, text=True, capture_output=True,
                         env={"PYTHONPATH": f"{tmp_path}:{IMPORT_PATH}"}, timeout=300)  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "core continues\nworker continues\n"), run.stderr

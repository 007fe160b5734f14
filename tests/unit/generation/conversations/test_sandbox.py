"""The sandbox, attacked by real programs."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.generation.conversations.programs import CannotStart, Ended
from swift_megatron_grpo.generation.conversations.sandbox import Limits, run_in_sandbox
from tests.paths import REPOSITORY

LIMITS = Limits(seconds=3.0, memory_bytes=2**28, disk_bytes=2**22, output_bytes=2**14)


def run(code: str, text: str = "", **options: Any) -> Ended:
    return asyncio.run(run_in_sandbox(["python3", "-c", code], text, **{"limits": LIMITS, **options}))


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    try:
        run("")
    except CannotStart as reason:
        pytest.skip(str(reason))


def test_a_program_reads_its_input_and_has_a_folder_and_the_packages() -> None:
    code = "import os, numpy; open('a', 'w').write(input()); print(open('a').read(), os.getcwd())"
    assert run(code, "17 + 25") == Ended(0, "17 + 25 /tmp\n", "")
    assert run("import os; print(os.path.exists('a'))").output == "False\n"  # the next one has a new folder


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 22))", "Network is unreachable"),
        ("import socket; socket.create_connection(('8.8.8.8', 53))", "Network is unreachable"),
        ("open('/usr/new', 'w')", "Read-only file system"),
        ("import os; os.chmod('/usr', 0o777)", "Read-only file system"),
        ("open('/etc/passwd')", "No such file"),
        ("open('FILE')", "No such file"),
        ("import os; os.kill(PID, 9)", "No such process"),
        ("bytearray(2**30)", "MemoryError"),
        ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
        ("open('big', 'wb').write(b'0' * 2**23)", "File too large"),
        ("for i in range(9): open(str(i), 'wb').write(b'0' * 2**20)", "No space left on device"),
        ("for i in range(9999): open(str(i), 'w')", "No space left on device"),
        ("all = [open('/dev/null') for _ in range(999)]", "Too many open files"),
        (
            "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
            "AssertionError",
        ),  # a user with all rights
        ("import os; os.setuid(0)", "not permitted|Invalid argument"),
        ("import os; os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))", "not permitted"),
        ("import os; os.chroot('/tmp')", "not permitted"),
    ],
)
def test_what_a_program_may_not_do_is_an_error_to_it(code: str, error: str) -> None:
    ended = run(code.replace("FILE", str(Path(__file__))).replace("PID", str(os.getpid())))
    assert ended.code == 1 and any(each in ended.errors for each in error.split("|")), ended


@pytest.mark.parametrize(
    ("code", "stopped", "ending"),
    [
        ("while True: pass", "it did not end within 3 seconds", -9),
        ("print(1, flush=True); import time; time.sleep(60)", "it did not end within 3 seconds", -9),
        ("import time; print('a' * 99999, flush=True); time.sleep(60)", "it wrote more than 16384 bytes", -9),
        ("import os; os.kill(os.getpid(), 11)", "", 128 + 11),
        ("import os; os.kill(1, 9); os.kill(-1, 15); print('alive')", "", 1),
        ("import sys; sys.exit(121)", "", 121),
    ],
)
def test_a_program_is_stopped_and_the_reason_is_known(code: str, stopped: str, ending: int) -> None:
    began = time.monotonic()
    ended = run(code)
    assert (ended.stopped, ended.code) == (stopped, ending) and time.monotonic() - began < 8
    assert len(ended.output) <= LIMITS.output_bytes and (code[:5] != "print" or ended.output == "1\n")


@pytest.mark.parametrize(
    ("code", "text", "fault"),
    [
        ("print(1)\0", "", "a word has a null character"),
        ("#" + "x" * 2**17, "", "too long for a process"),
        ("print('\ud800')", "", "half of a surrogate pair"),
        ("print(1)", "\ud800", "half of a surrogate pair"),
    ],
)
def test_code_that_no_process_can_be_started_with_is_an_error_to_it(code: str, text: str, fault: str) -> None:
    """The policy writes the code, so the run has to go on."""
    ended = run(code, text)
    assert ended.code != 0 and fault in ended.errors


def test_nothing_that_a_program_starts_outlives_it() -> None:
    """A process that has left the group of the program is killed as well."""
    mark = f"{time.time_ns()}"
    code = f"import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(600 + 0 * {mark})"
    assert run(code).code == 0
    deadline = time.monotonic() + 10
    while any(mark in _command_line(process) for process in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_many_programs_at_once_have_their_own_limits() -> None:
    code = "import os, time\nfor _ in range(9):\n if os.fork() == 0: time.sleep(60)\nprint(os.getuid())"

    async def main() -> list[Ended]:
        words = ["python3", "-c", code]
        return list(await asyncio.gather(*(run_in_sandbox(words, limits=LIMITS) for _ in range(8))))

    assert [ended.code for ended in asyncio.run(main())] == [0] * 8


def test_a_program_that_floods_its_output_meets_a_limit_of_the_kernel() -> None:
    ended = run("while True: print('a' * 2**20)")
    assert ended.stopped == "it wrote more than 16384 bytes" or "File too large" in ended.errors
    assert len(ended.output) == LIMITS.output_bytes


def test_the_environment_of_the_run_is_not_that_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "key")
    output = run("import os; print(sorted(os.environ)); print(open('/proc/1/environ').read())").output
    assert "A_SECRET" not in output and "HOME" in output


def test_more_folders_are_visible_if_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "cases.txt").write_text("17")
    code = f"print(open({str(tmp_path / 'cases.txt')!r}).read()); open({str(tmp_path / 'new')!r}, 'w')"
    tmp_path.chmod(0o777)
    ended = run(code, visible=[str(tmp_path)])
    assert ended.output == "17\n" and "Read-only file system" in ended.errors


def test_a_sandbox_that_cannot_start_runs_nothing() -> None:
    """Inside another one, which forbids namespaces."""
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from swift_megatron_grpo.generation.conversations.sandbox import run_in_sandbox
asyncio.run(run_in_sandbox(["python3", "-c", "print('it runs')"]))
"""
    ended = run(code, visible=[str(REPOSITORY)])
    assert "CannotStart: the sandbox cannot start: [Errno" in ended.errors and "it runs" not in ended.output
    assert "use a sandbox on another machine" in ended.errors
    with pytest.raises(CannotStart, match="No such file or directory"):
        asyncio.run(run_in_sandbox(["no-such-program"]))

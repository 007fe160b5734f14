"""A process that has imported everything and forks ranks: `python -m tests.forking.server KIND SOCKET OWNER`.

The test processes of one pytest session, or of all stages of scripts/test.sh, share it. Requests arrive as JSON over a
Unix socket, each with two file descriptors: the output of the run, and a pipe for its exit code; two more are those of
its input and of its errors, if these are separate. The server has one thread, because a fork copies only the calling
thread. For each request it forks a leader with a new process group,
which replaces torchrun: it forks the ranks, ends all of them when one fails, and reports the exit code. When a test
process disconnects, its runs end. The server ends when no test process is connected and its socket is removed or its
owner, a process id, has ended.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn

from tests.forking.programs import PRELOAD, PROGRAMS

_LARGEST_REQUEST = 2**20
_OWNER_CHECK = 1.0  # seconds between two looks at the owner
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as torchrun's


def main(kind: str, path: str, owner: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # these are for pytest; the server and all runs end after it
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # ranks share one pipe
    gc.disable()  # collections would take 7 % of the imports
    PRELOAD[kind]()
    if threading.active_count() > 1:
        raise SystemExit(f"imports of {kind} started threads, which a fork would lose: {threading.enumerate()}")
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a forked process would copy the pages of every imported object
    with _listen(path) as listener:
        leaders: dict[socket.socket, list[int]] = {}
        while leaders or (os.path.exists(path) and _is_alive(owner)):
            ready, _, _ = select.select([listener, *leaders], [], [], _OWNER_CHECK)
            for connection in ready:
                if connection is listener:
                    leaders[listener.accept()[0]] = []
                else:
                    _serve(connection, leaders, listener)


def _is_alive(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")


def _listen(path: str) -> socket.socket:
    """Listen at the path, which appears once clients can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)
    return listener


def _serve(connection: socket.socket, leaders: dict[socket.socket, list[int]], listener: socket.socket) -> None:
    """Fork the leader of a requested run; end all runs of a client that has disconnected."""
    data, fds, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, 4)
    leaders[connection] = [pid for pid in leaders[connection] if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    if not data:
        for pid in leaders.pop(connection):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        connection.close()
        return
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        for inherited in (listener, *leaders):
            inherited.close()
        _lead(request, *fds)
    for descriptor in fds:
        os.close(descriptor)
    if request["program"] != "server":  # which other test processes use as well, and which ends with the owner
        leaders[connection].append(pid)
    connection.send(json.dumps({"pid": pid}).encode())


def _lead(request: dict[str, Any], output: int, status: int, *more_streams: int) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor, number in zip(more_streams, (0, 2), strict=False):
        os.dup2(descriptor, number)
    for descriptor in (output, *more_streams):
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    ranks = request["ranks"]
    if ranks == 0:  # without torchrun this process is the command
        code = _run(request)
    else:
        pids = [_fork_rank(request, rank, status) for rank in range(ranks)]
        signal.signal(signal.SIGTERM, lambda *_: _end(pids))
        code = _wait(pids, request["kills_ranks"])
    with suppress(BrokenPipeError):  # the client has ended
        os.write(status, str(code).encode())
    os._exit(code)


def _fork_rank(request: dict[str, Any], rank: int, status: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.close(status)
    ranks = request["ranks"]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
        NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]),
    )  # fmt: skip
    os._exit(_run(request))


def _run(request: dict[str, Any]) -> int:
    code: int = 0
    try:
        PROGRAMS[request["program"]](request["arguments"])
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    return code


def _wait(pids: list[int], kills_ranks: bool) -> int:
    """Wait for all ranks; when one fails, end the others, as torchrun does. Return 1 if any failed, else 0."""
    remaining, failed = set(pids), 0
    while remaining:
        pid, wait_status = os.wait()
        remaining.discard(pid)
        code = os.waitstatus_to_exitcode(wait_status)
        if code and not failed:
            failed = 1
            print(f"rank {pids.index(pid)} ended with exit code {code}; ending the others", file=sys.stderr)
            if kills_ranks:
                _signal(remaining, signal.SIGKILL)
            else:
                _end(remaining)
    return failed


def _end(pids: Iterable[int]) -> None:
    """Send SIGTERM now and SIGKILL after the grace period."""
    _signal(pids, signal.SIGTERM)
    signal.signal(signal.SIGALRM, lambda *_: _signal(pids, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, _GRACE)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    os._exit(0)  # Python's shutdown would free every imported object, and print what compiled modules leak

"""The first program of a process that programs.py starts: it prepares the process, and becomes the program.

    python -I -S first_program.py SETTINGS WORD ...

It imports only what starts in milliseconds. The kernel kills the process when the thread that started it ends. With
limits it also sees another machine: no network, no other process, and the folders of its programs, which are
read-only. Its own folder, /tmp, is in memory. Root becomes a user without rights, and others a user of their own.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38  # of prctl
_NEW_USER, _NEW_OTHERS = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000  # mounts, pids, network, ipc
_NOSUID, _NODEV, _NOEXEC, _BIND, _MOVE, _REC, _PRIVATE = 2, 4, 8, 1 << 12, 1 << 13, 1 << 14, 1 << 18  # of mount
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_FIRST_USER = 0x70000000  # of those that no system gives to anyone; each process gets one, so that its limit counts
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def main(settings: str, *words: str) -> NoReturn:
    given = json.loads(settings)
    os.set_inheritable(given["failure"], False)
    try:
        if given["isolation"] is not None:
            _isolate(given["isolation"])
        else:
            signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # also what the program has started
            _end_with_parent(signal.SIGTERM)
            if os.getppid() != given["parent"]:  # it has ended already
                os._exit(1)
            _continue_as_child()
        os.execvp(words[0], words)
    except OSError as error:
        os.write(given["failure"], f"{error} ({' '.join(words)[:200]})".encode())
        os._exit(1)


def _end_with_parent(by: int = signal.SIGKILL) -> None:
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, by, 0, 0, 0)


def _isolate(limits: dict[str, Any]) -> None:
    """Return in a process that is isolated; the one that was started waits for it."""
    user, group, number = os.getuid(), os.getgid(), os.getpid()
    _call("unshare", _NEW_OTHERS if user == 0 else _NEW_OTHERS | _NEW_USER)
    if user != 0:
        _keep_user(user, group)
    _continue_as_child()
    _enter_new_root(limits["visible"], limits["disk_bytes"])
    with suppress(OSError):  # where this is forbidden, it is to the program as well
        if user == 0:
            _become(_FIRST_USER + number)
            _call("unshare", _NEW_USER)
            _keep_user(_FIRST_USER + number, _FIRST_USER + number)
        _write("/proc/sys/user/max_user_namespaces", "0")  # of the program, which would have all rights in one
    assert os.getuid() != 0
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _continue_as_child()  # the first process of its kind would be spared by many signals
    for name, limit in limits["resources"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def _keep_user(user: int, group: int) -> None:
    """Be the same user in the new namespace of users."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else its files in /proc are root's
    _end_with_parent()  # which the change of users has undone


def _continue_as_child() -> None:
    """Fork. The parent waits, and ends as the child does; the child ends with the parent."""
    child = os.fork()
    if child:
        while (ended := os.wait())[0] != child:  # others are those that their parents have left
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(code if code >= 0 else 128 - code)
    _end_with_parent()


def _enter_new_root(visible: list[str], disk_bytes: int) -> None:
    """Replace the root by a folder in memory, with the visible folders and the devices of the old one."""
    root = "/proc"  # it is on every machine, and no program is in it
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={disk_bytes},nr_inodes=4096,mode=755")
    for path in visible:
        os.makedirs(root + path, exist_ok=True)
        _mount(path, root + path, "", _BIND | _REC)
        read_only = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID | _NODEV, 0, 0, 0)
        _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, (root + path).encode(), _AT_RECURSIVE, read_only, 32)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for path in _DEVICES:
        _write(root + path, "")
        _mount(path, root + path, "", _BIND)
    os.makedirs(f"{root}/proc", exist_ok=True)
    with suppress(OSError):  # a container may forbid it
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    os.chdir(root)
    _mount(".", "/", "", _MOVE)
    os.chroot(".")
    os.chdir("/tmp")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])

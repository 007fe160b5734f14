"""The API key of the rollout servers: where it is read from, and how it stays out of process lists."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

API_KEY_VARIABLE = "SWIFT_ROLLOUT_API_KEY"
API_KEY_FILE_VARIABLE = "SWIFT_ROLLOUT_API_KEY_FILE"

_ARGUMENTS_START = 47  # field of /proc/self/stat, from 0: where the command line begins in memory


def read_api_key(environ: Mapping[str, str]) -> str | None:
    """Return the key of the variable, or of the file that the other variable names; None if neither is set."""
    if environ.get(API_KEY_VARIABLE):
        return environ[API_KEY_VARIABLE]
    path = environ.get(API_KEY_FILE_VARIABLE)
    if not path:
        return None
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{API_KEY_FILE_VARIABLE}={path} cannot be read ({error}); name a text file that contains only the key"
        ) from None
    if not key.isprintable() or not key:
        raise ValueError(f"{API_KEY_FILE_VARIABLE}={path} must contain the key, in one line")
    return key


def hide_in_process_list(secret: str) -> None:
    """Overwrite a secret in this process's command line, which every user of the machine can read in Linux's /proc."""
    hidden = secret.encode("utf-8", "surrogateescape")
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()  # the name before ")" may have spaces
        start = int(fields[_ARGUMENTS_START - 2])
        command_line = Path("/proc/self/cmdline").read_bytes()
    except (OSError, IndexError, ValueError):
        return
    position = command_line.find(hidden) if hidden and start else -1
    while position >= 0:
        ctypes.memset(start + position, ord("*"), len(hidden))
        position = command_line.find(hidden, position + len(hidden))

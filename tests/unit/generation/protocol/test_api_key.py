"""The API key: read from a variable or a file, and hidden in the process list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE, read_api_key

HIDE = """
import sys
from pathlib import Path
from swift_megatron_grpo.generation.protocol.api_key import hide_in_process_list
hide_in_process_list(sys.argv[2])
hide_in_process_list("not there")
print(Path("/proc/self/cmdline").read_bytes().decode().split("\\0")[3:])
print(sys.argv)
"""


def test_the_key_is_read_from_the_variable_or_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" schlüssel \n", encoding="utf-8")
    assert read_api_key({}) is None and read_api_key({API_KEY_VARIABLE: "", API_KEY_FILE_VARIABLE: ""}) is None
    assert read_api_key({API_KEY_VARIABLE: "a"}) == "a"
    assert read_api_key({API_KEY_FILE_VARIABLE: str(file)}) == "schlüssel"
    assert read_api_key({API_KEY_FILE_VARIABLE: str(file), API_KEY_VARIABLE: "a"}) == "a"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"a\nb\n", b"\xff\xfe"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{API_KEY_FILE_VARIABLE}={file} (cannot be read|must contain the key)"):
        read_api_key({API_KEY_FILE_VARIABLE: str(file)})


@pytest.mark.skipif(sys.platform != "linux", reason="the command line is in /proc only there")
def test_a_key_is_hidden_in_the_process_list() -> None:
    """The process itself keeps its arguments."""
    command = [sys.executable, "-c", HIDE, "--api_key", "schlüssel 1", "--api_key=schlüssel 1", "--port"]
    shown, kept = subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    stars = "*" * len("schlüssel 1".encode())
    assert shown == str(["--api_key", stars, f"--api_key={stars}", "--port", ""])
    assert kept == str(["-c", *command[3:]])

"""Moves the API key of the rollout servers from the command line to the environment.

ms-swift's `swift` and `megatron` scripts print the command that they start, with all arguments, and every user of a
machine can read the command lines of its processes. Environments can be read by their owner only.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import MutableMapping
from types import ModuleType
from typing import Any

from swift_megatron_grpo.plugin.command_line import selects_grpo

_FLAGS = {"rollout": "api_key", "rollout.py": "api_key", "rlhf": "vllm_server_api_key"}  # by command
_PRINTED = re.compile(r"(--(?:vllm_server_)?api[-_]key[= ]).*?(?= --|`|$)")
_SCRIPTS = "swift.cli.main"  # prints the command


def hide_api_key(argv: list[str], environ: MutableMapping[str, str]) -> None:
    """Remove the key's flag from the arguments of a script that runs `swift rollout` or GRPO, and set the variable."""
    launcher = sys.modules.get(_SCRIPTS)
    if launcher is not None:
        _mask_printed_commands(launcher)
    command = argv[2:3] if argv[1:2] == ["megatron"] else argv[1:2]
    flag = _FLAGS.get(os.path.basename(argv[0])) or _FLAGS.get("".join(command))
    if flag is None or (flag == _FLAGS["rlhf"] and not selects_grpo(argv)):
        return
    key = _take(argv, flag)
    if key:
        from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE, hide_in_process_list

        environ[API_KEY_VARIABLE] = key
        hide_in_process_list(key)


def _take(argv: list[str], flag: str) -> str | None:
    """Remove all occurrences of a flag and its value; return the last value."""
    value = None
    for index in reversed(range(1, len(argv))):
        name, equals, inline = argv[index].partition("=")
        if not name.startswith("--") or name[2:].replace("-", "_") != flag:
            continue
        found = inline if equals else "".join(argv[index + 1 : index + 2])
        if not found:  # ms-swift's parser reports the missing value
            continue
        del argv[index : index + (1 if equals else 2)]
        value = value or found
    return value


def _mask_printed_commands(launcher: ModuleType) -> None:
    """Mask keys that a YAML file of arguments adds to the command. The script is about to run, and prints one line."""

    def print_masked(*values: Any, **options: Any) -> None:
        builtins.print(*(_PRINTED.sub(r"\1***", str(value)) for value in values), **options)

    vars(launcher)["print"] = print_masked

"""Classify a process by its command line: does this package change it, and how? Imports nothing slow.

Also move the API key of the rollout servers from the command line to the environment: ms-swift's `swift` and `megatron`
scripts print the command that they start, with all arguments, and every user of a machine can read the command lines of
its processes. Environments can be read by their owner only.
"""

import builtins
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

CONFIG_FILES = (".yaml", ".yml")  # ends of the name of a file of flags
MODES = {
    "on": "the trainer, and the CPU platform where there is no accelerator",
    "off": "nothing: ms-swift as without this package",
    "platform": "only the CPU platform, under ms-swift's own trainer",
}
RANK = "rank"  # a rank, or the only process, of `megatron rlhf --rlhf_type grpo`
HELP = "help"  # `megatron rlhf --help`, whose parser imports modules that need the CPU platform or CUDA
ROLLOUT = "rollout"  # the server that `swift rollout` starts
TORCHRUN = "torchrun"  # that starts such ranks
LAUNCHER = "launcher"  # the `megatron` or `swift` script, about to start one of these commands
SWIFT_MEGATRON = "swift megatron"  # the `swift` script, about to run `swift megatron ...`

_RANK_SCRIPT = os.path.join("swift", "cli", "_megatron", "rlhf.py")
_RANK_MODULE = "swift.cli._megatron.rlhf"
_ROLLOUT_SCRIPT = os.path.join("swift", "cli", "rollout.py")
MEGATRON_MODULE = "swift.cli._megatron.main"  # what the `megatron` script runs
_ROLLOUT_MODULE = "swift.cli.rollout"
_TORCHRUN_MODULE = "torch.distributed.run"
_SCRIPTS = {_RANK_MODULE: _RANK_SCRIPT, _ROLLOUT_MODULE: _ROLLOUT_SCRIPT}
_KEY_FLAGS = {"rollout": "api_key", "rollout.py": "api_key", "rlhf": "vllm_server_api_key"}  # by command
_PRINTED = re.compile(r"(--(?:vllm_server_)?api[-_]key[= ]).*?(?= --|`|$)")
_GRPO_IN_FILE = re.compile(r"""^["']?rlhf_type["']?\s*:\s*["']?grpo\b""", re.MULTILINE)
_ROLES_IN_FILE = re.compile(
    r"""^["']?(?:(?:train|rollout|colocate_groups|device_groups)["']?\s*:|use_ray["']?\s*:\s*["']?true)""",
    re.MULTILINE | re.IGNORECASE,
)
_LAUNCHER_MODULE = "swift.cli.main"  # prints the command


def classify(argv: Sequence[str], orig_argv: Sequence[str]) -> str | None:
    """Return RANK, HELP, ROLLOUT, TORCHRUN, LAUNCHER or SWIFT_MEGATRON; None: this package leaves the process alone.

    `argv` is sys.argv, `orig_argv` sys.orig_argv. Both are needed: a child of multiprocessing's spawn carries its
    parent's sys.argv, and during `python -m package.module` sys.argv[0] is still "-m" while the package is imported.
    """
    _, option, program = program_of(orig_argv)
    if not argv or option == "-c":  # an embedded interpreter; a child of multiprocessing
        return None
    script = _SCRIPTS.get(program, argv[0]) if argv[0] == "-m" else argv[0]
    if script.endswith(_RANK_SCRIPT):
        return _classify_rank(argv[1:])
    if script.endswith(_ROLLOUT_SCRIPT):
        return ROLLOUT
    if program == _TORCHRUN_MODULE or os.path.basename(script) == "torchrun":
        return TORCHRUN if arguments_of_ranks(argv[1:]) is not None else None
    if os.path.basename(script) == "swift" and argv[1:2] == ["megatron"]:
        return SWIFT_MEGATRON
    name = "megatron" if program == MEGATRON_MODULE else os.path.basename(script)
    return LAUNCHER if (name, *argv[1:2]) in (("megatron", "rlhf"), ("swift", "rollout")) else None


def arguments_of_ranks(args: Sequence[str]) -> list[str] | None:
    """Return the arguments of the ranks in a command line of torchrun; None if they are not ranks of this trainer."""
    for index, arg in enumerate(args):
        if arg.endswith(_RANK_SCRIPT) or arg == _RANK_MODULE:
            rest = list(args[index + 1 :])
            return rest if _classify_rank(rest) == RANK else None
    return None


def _classify_rank(args: Sequence[str]) -> str | None:
    rlhf_type = parse_flag(args, "rlhf_type")
    if rlhf_type is None and ("--help" in args or "-h" in args):
        return HELP
    return RANK if rlhf_type == "grpo" else None


def selects_grpo(args: Sequence[str]) -> bool:
    """Return True if ms-swift's parser will read `--rlhf_type grpo` from these arguments."""
    return parse_flag(args, "rlhf_type") == "grpo"


def parse_flag(args: Sequence[str], wanted: str) -> str | None:
    """Return the value of a flag as ms-swift's parser reads it; None if the flag is absent.

    The parser accepts "-" for "_", "=" before the value, and abbreviations; the last occurrence counts.
    """
    found = None
    for index, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and name and wanted.startswith(name):
            found = value if equals else "".join(args[index + 1 : index + 2])
    return found


def seconds_of(args: Sequence[str], flag: str, default: float) -> float:
    """Return the value of a flag in seconds; the default for what is no number, which the ranks refuse."""
    with suppress(ValueError):
        return float(parse_flag(args, flag) or "")
    return default


def asks_for_check(args: Sequence[str]) -> bool:
    """Return True for a command of this trainer with `--check true`: a dry run in place of the training."""
    value = parse_flag(args, "check")
    if value is None or not selects_grpo(args):
        return False
    return value == "" or value.startswith("--") or value.lower() in ("true", "t", "yes", "y", "1")


def uses_ray(args: Sequence[str]) -> bool:
    """Return True for `--use_ray`, which starts the ranks on Ray."""
    value = parse_flag(args, "use_ray")
    return value is not None and value.lower() != "false"


def has_roles(args: Sequence[str]) -> bool:
    """Return True for a GRPO run that launch/ starts: it uses Ray, or its file of flags has roles.

    `args`: the arguments of `megatron rlhf`.
    """
    path = args[0] if args and args[0].endswith(CONFIG_FILES) else parse_flag(args, "config")
    config = Path(path or os.devnull)
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    is_grpo = selects_grpo(args) or bool(_GRPO_IN_FILE.search(text))
    return is_grpo and (uses_ray(args) or bool(_ROLES_IN_FILE.search(text)))


def program_of(orig_argv: Sequence[str]) -> tuple[int, str, str]:
    """Parse the interpreter's command line: index of the program, option ("-c", "-m", "" for a script), its name."""
    index = 1
    while index < len(orig_argv) and orig_argv[index].startswith("-"):
        argument = orig_argv[index]
        consumed = 1 if argument != "--check-hash-based-pycs" else 2
        letters = argument[1:] if not argument.startswith("--") else ""
        for position, letter in enumerate(letters):  # -uW ignore, -um module, -mmodule
            if letter not in "cmWX":
                continue
            value = letters[position + 1 :] or "".join(orig_argv[index + 1 : index + 2])
            if letter in "cm":
                return index, f"-{letter}", value
            consumed = 1 if letters[position + 1 :] else 2
            break
        index += consumed
    return index, "", "".join(orig_argv[index : index + 1])


# ---- the API key


def hide_api_key(argv: list[str], environ: MutableMapping[str, str]) -> None:
    """Remove the key's flag from the arguments of a script that runs `swift rollout` or GRPO, and set the variable."""
    launcher = sys.modules.get(_LAUNCHER_MODULE)
    if launcher is not None:
        _mask_printed_commands(launcher)
    command = argv[2:3] if argv[1:2] == ["megatron"] else argv[1:2]
    flag = _KEY_FLAGS.get(os.path.basename(argv[0])) or _KEY_FLAGS.get("".join(command))
    if flag is None or (flag == _KEY_FLAGS["rlhf"] and not selects_grpo(argv)):
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

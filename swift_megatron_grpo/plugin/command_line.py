"""Decide from the command line and the environment what this package does in a process. Imports nothing slow."""

from __future__ import annotations

import os
from collections.abc import Sequence

MODES = {
    "on": "the trainer, and the CPU platform where there is no accelerator",
    "off": "nothing: ms-swift as without this package",
    "platform": "only the CPU platform, under ms-swift's own trainer",
}
RANK = "rank"  # a rank, or the only process, of `megatron rlhf --rlhf_type grpo`
ROLLOUT = "rollout"  # the server that `swift rollout` starts
SWIFT_MEGATRON = "swift megatron"  # the `swift` script, about to run `swift megatron ...`

_RANK_SCRIPT = os.path.join("swift", "cli", "_megatron", "rlhf.py")
_RANK_MODULE = "swift.cli._megatron.rlhf"
_ROLLOUT_SCRIPT = os.path.join("swift", "cli", "rollout.py")
_ROLLOUT_MODULE = "swift.cli.rollout"
_SCRIPTS = {_RANK_MODULE: _RANK_SCRIPT, _ROLLOUT_MODULE: _ROLLOUT_SCRIPT}


def classify(argv: Sequence[str], orig_argv: Sequence[str]) -> str | None:
    """RANK, ROLLOUT, SWIFT_MEGATRON, or None for a process that is none of this package's business.

    `argv` is sys.argv, `orig_argv` sys.orig_argv. Both are needed: a child of multiprocessing's spawn carries its
    parent's sys.argv, and during `python -m package.module` sys.argv[0] is still "-m" while the package is imported.
    """
    _, option, program = program_of(orig_argv)
    if not argv or option == "-c":  # an embedded interpreter; a child of multiprocessing
        return None
    script = _SCRIPTS.get(program, argv[0]) if argv[0] == "-m" else argv[0]
    if script.endswith(_RANK_SCRIPT):
        return RANK if asks_for_grpo(argv[1:]) and not _asks_for_ray(argv[1:]) else None
    if script.endswith(_ROLLOUT_SCRIPT):
        return ROLLOUT
    if os.path.basename(script) == "swift" and argv[1:2] == ["megatron"]:
        return SWIFT_MEGATRON
    return None


def asks_for_grpo(args: Sequence[str]) -> bool:
    """Whether ms-swift's parser will read `--rlhf_type grpo` from these: "-" for "_", "=", abbreviations, the last."""
    rlhf_type = ""
    for index, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and name and "rlhf_type".startswith(name):
            rlhf_type = value if equals else "".join(args[index + 1 : index + 2])
    return rlhf_type == "grpo"


def _asks_for_ray(args: Sequence[str]) -> bool:
    """ms-swift's Ray pipeline has trainers of its own; its workers are other processes."""
    return "--use_ray" in args and "".join(args[args.index("--use_ray") + 1 :][:1]).lower() != "false"


def program_of(orig_argv: Sequence[str]) -> tuple[int, str, str]:
    """What the interpreter was told to run: where it is said, the option ("-c", "-m", "" for a script), the name."""
    index = 1
    while index < len(orig_argv) and orig_argv[index].startswith("-"):
        argument = orig_argv[index]
        taken = 1 if argument != "--check-hash-based-pycs" else 2
        letters = argument[1:] if not argument.startswith("--") else ""
        for position, letter in enumerate(letters):  # -uW ignore, -um module, -mmodule
            if letter not in "cmWX":
                continue
            value = letters[position + 1 :] or "".join(orig_argv[index + 1 : index + 2])
            if letter in "cm":
                return index, f"-{letter}", value
            taken = 1 if letters[position + 1 :] else 2
            break
        index += taken
    return index, "", "".join(orig_argv[index : index + 1])

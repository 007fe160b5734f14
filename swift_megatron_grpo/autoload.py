"""What `import torch` calls, in every process of an environment in which this package is installed.

The entry point is in the group `torch.backends`: torch calls it at the end of its own import. So this module decides
from the command line what the process is, in well under a millisecond, and only for a rank of `megatron rlhf
--rlhf_type grpo` puts hooks on modules that are imported later; `swift rollout` becomes this package's server.
SWIFT_MEGATRON_GRPO=off turns all of it off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

VARIABLE = "SWIFT_MEGATRON_GRPO"
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
_SERVER_MODULE = "swift_megatron_grpo.server"
_SCRIPTS = {_RANK_MODULE: _RANK_SCRIPT, _ROLLOUT_MODULE: _ROLLOUT_SCRIPT}
_MEGATRON_MODULE = "swift.cli._megatron.main"  # what the `megatron` script runs


def arm() -> None:
    """Called by torch. A failure must not take down a process that only wanted torch."""
    try:
        _arm(sys.argv, sys.orig_argv, os.environ)
    except Exception as error:
        print(f"swift-megatron-grpo: not active in this process: {type(error).__name__}: {error}", file=sys.stderr)


def _arm(argv: Sequence[str], orig_argv: Sequence[str], environ: Mapping[str, str]) -> None:
    process = classify(argv, orig_argv)
    if process is None:
        return
    mode = environ.get(VARIABLE, "on")
    if mode not in MODES:
        choices = "; ".join(f"{name}: {meaning}" for name, meaning in MODES.items())
        raise SystemExit(f"swift-megatron-grpo: {VARIABLE}={mode!r} is none of its values ({choices})")
    if mode == "off":
        return
    if process == SWIFT_MEGATRON:
        _hand_over(_MEGATRON_MODULE, argv[2:], orig_argv)
    if process == ROLLOUT:
        if mode == "on":
            _hand_over(_SERVER_MODULE, argv[1:], orig_argv)
        return
    hook_platform()
    if mode == "on":
        from swift_megatron_grpo.plugin import register

        register()


def hook_platform() -> None:
    """Have the CPU platform in place before the first module that needs CUDA to be imported."""
    from swift_megatron_grpo.import_hooks import before_import

    for name in ("mcore_bridge", "megatron.core"):  # whichever comes first
        before_import(name, _activate_platform)


def _activate_platform() -> None:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":  # Megatron has no Metal backend
        from swift_megatron_grpo.platforms.cpu import activate

        activate()


def classify(argv: Sequence[str], orig_argv: Sequence[str]) -> str | None:
    """RANK, ROLLOUT, SWIFT_MEGATRON, or None for a process that is none of this package's business.

    `argv` is sys.argv, `orig_argv` sys.orig_argv. Both are needed: a child of multiprocessing's spawn carries its
    parent's sys.argv, and during `python -m package.module` sys.argv[0] is still "-m" while the package is imported.
    """
    _, option, program = _program(orig_argv)
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


def _program(orig_argv: Sequence[str]) -> tuple[int, str, str]:
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


def _hand_over(module: str, args: Sequence[str], orig_argv: Sequence[str]) -> None:
    """This process becomes `python -m module args`, for what is being imported by now and can no longer be hooked.

    `swift megatron X`, which ms-swift's `swift` does not have, becomes `megatron X`; `swift rollout` becomes this
    package's server. -P keeps the current folder out of sys.path, where `-m` would put it and a console script does
    not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    options = orig_argv[1 : _program(orig_argv)[0]]
    os.execv(sys.executable, [sys.executable, *options, "-P", "-m", module, *args])

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

from swift_megatron_grpo.plugin.command_line import ROLLOUT, SWIFT_MEGATRON, classify, program_of
from swift_megatron_grpo.plugin.mode import MODES, VARIABLE

_SERVER_MODULE = "swift_megatron_grpo.server"
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
        from swift_megatron_grpo.plugin.register import register

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


def _hand_over(module: str, args: Sequence[str], orig_argv: Sequence[str]) -> None:
    """This process becomes `python -m module args`, for what is being imported by now and can no longer be hooked.

    `swift megatron X`, which ms-swift's `swift` does not have, becomes `megatron X`; `swift rollout` becomes this
    package's server. -P keeps the current folder out of sys.path, where `-m` would put it and a console script does
    not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    options = orig_argv[1 : program_of(orig_argv)[0]]
    os.execv(sys.executable, [sys.executable, *options, "-P", "-m", module, *args])

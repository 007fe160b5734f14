"""The values on the command line, as the parser converts them: types and choices, checked in one error.

argparse itself ends at the first one, below a usage of 400 lines, and suggests no value.
"""

from __future__ import annotations

import difflib
from argparse import Action, ArgumentTypeError
from collections.abc import Mapping, Sequence
from typing import Any

from swift_megatron_grpo.settings.flag import as_typed
from swift_megatron_grpo.settings.groups import RANGES

_KINDS = {"int": "an integer", "float": "a number", "string_to_bool": "true or false"}
_LISTED = 12  # choices that a message lists


def check_flag_values(command_line: Sequence[str], options: Mapping[str, Action]) -> None:
    """Raise one ValueError that names every value that the parser would not accept.

    `options`: the parser's, by their names on the command line.
    """
    problems = []
    for flag, values in _typed(command_line, options):
        action = options[flag]
        name = action.dest
        if not values and action.nargs not in ("?", "*", 0):
            problems.append(f"--{name} has no value; use --{name} {_example(action)}")
        problems += [problem for value in values if (problem := _problem(action, name, value)) is not None]
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def _typed(command_line: Sequence[str], options: Mapping[str, Action]) -> list[tuple[str, list[str]]]:
    """Return the flags that are spelt out, with their values."""
    typed: list[tuple[str, list[str]]] = []
    known = False
    for argument in command_line:
        if argument.startswith("--") and " " not in argument:
            flag, equals, value = argument.partition("=")
            known = flag in options
            if known:
                typed.append((flag, [value] if equals else []))
        elif known:
            typed[-1][1].append(argument)
    return typed


def _problem(action: Action, name: str, text: str) -> str | None:
    try:
        value = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, ArgumentTypeError):
        kind = _KINDS.get(type_name := action.type.__name__ if isinstance(action.type, type) else "string_to_bool")
        needed = f"{kind or type_name}"
        return f"--{name} {text} is not {needed}; use --{name} {_example(action)}"
    if action.choices is None or value in action.choices:
        return None
    choices = [as_typed(choice) for choice in action.choices]
    close = difflib.get_close_matches(text, choices, n=1)
    first = close or [choice for choice in choices[:1]]
    listed = " or ".join([*first, *(choice for choice in choices if choice not in first)][:_LISTED])
    return f"--{name} {text}: unknown value; use --{name} {listed}"


def _example(action: Action) -> str:
    """Return a value that works: of the table of ranges, a choice, the default, or a word for what it is."""
    name, default = action.dest, action.default
    if name in RANGES:
        return str(RANGES[name].use)
    if action.choices is not None:
        return " or ".join(as_typed(choice) for choice in list(action.choices)[:_LISTED])
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int | float | str) and default != "":
        return str(default)
    return _EXAMPLES.get(name) or _OF_TYPES.get(action.type if isinstance(action.type, type) else None, "true or false")


_EXAMPLES: Mapping[str, str] = {
    "model": "with a folder or a hub id",
    "dataset": "with a file or a hub id",
    "output_dir": "with a folder",
    "loss_type": "grpo",
    "vllm_server_port": "8000",
    "reward_funcs": "with one or more reward functions",
}
_OF_TYPES: Mapping[Any, str] = {int: "8", float: "0.5", str: "with a value"}

"""Read the settings of a file that may come from anywhere: nothing in it runs, and what it expands to is bounded.

A shell script has settings as key=value words (verl, siiRL) or as flags (slime, TRL), in commands and in arrays;
variables that the script or the environment sets are replaced. YAML has them nested, with references such as
${data.batch_size}. A Python program has them in calls (TRL).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.check_script.shell import Shell
from swift_megatron_grpo.cli.convert.programs import settings_of_program
from swift_megatron_grpo.cli.convert.tables import COMPUTED
from swift_megatron_grpo.launch.roles import read_flags
from swift_megatron_grpo.launch.safe_yaml import MOST, parse_yaml

_OF_ACCELERATE = ("num_processes", "num_machines")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_OVERRIDE = re.compile(r"\+{0,2}([a-zA-Z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ADDED = re.compile(r"\+{0,2}([a-zA-Z_][\w.]*)=(.*)", re.DOTALL)
_TRAINER = re.compile(r"(^|/)train\w*\.py$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def read_settings(
    path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return key: value. `overrides`: key=value words that come after the file's. Raises ValueError."""
    if path.stat().st_size > MOST:
        raise ValueError(f"settings do not have more than {MOST:,} bytes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not a text file") from error
    if wrong := [word for word in overrides if not _ADDED.fullmatch(word)]:
        raise ValueError(f"{wrong[0]} is not KEY=VALUE")
    try:
        if path.suffix in (".yaml", ".yml"):
            settings = dict(_bounded(_flatten(parse_yaml(text) or {})))
        elif path.suffix == ".py":
            settings = dict(_bounded(settings_of_program(text)))
        else:
            settings = dict(_bounded(_of_script(text, environment)))
        settings |= _overrides(overrides, _ADDED, Shell(None).value_of)
        return _References(settings).replaced()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _bounded(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the settings. Raises ValueError when they are larger than a file of settings."""
    room = MOST
    for key, value in settings:
        room -= len(key) + len(str(value))
        if room < 0:
            raise ValueError(f"its settings have more than {MOST:,} characters")
        yield key, value


# ---- shell scripts


def _of_script(script: str, environment: Mapping[str, str] | None) -> Iterator[tuple[str, Any]]:
    """Yield overrides from commands and arrays, and the flags of the command that starts a trainer."""
    shell = Shell(environment)
    commands = [words for words, _ in shell.run(script)]
    for command in [*shell.arrays.values(), *commands]:
        yield from _overrides(command, _OVERRIDE, shell.value_of)
    for command in commands:
        yield from _flags_of(command)


def _flags_of(command: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the flags of slime's train*.py with their dashes, and those of TRL's programs as fields of GRPOConfig."""
    of_trl = list(command[:2]) == ["trl", "grpo"]
    start = 1 if of_trl else next((i for i, word in enumerate(command) if word.endswith(".py")), len(command))
    given = read_flags(command[start + 1 :])
    of_trl = of_trl or "model_name_or_path" in given
    if of_trl:
        of_launcher = read_flags(command[:start])
        given = {name: of_launcher[name] for name in _OF_ACCELERATE if name in of_launcher} | given
    elif start == len(command) or not _TRAINER.search(command[start]):
        return
    for name, words in given.items():
        values = [_scalar(word) if word else COMPUTED for word in words]
        key = name if of_trl else f"--{name.replace('_', '-')}"
        yield key, values if len(values) > 1 else values[0] if values else True


def _overrides(
    words: Iterable[str], form: re.Pattern[str], value_of: Callable[[str], str | None]
) -> Iterator[tuple[str, Any]]:
    """Yield the words of this form, key=value. Some commands are evaluated only after their variables are assigned."""

    def replacement(match: re.Match[str]) -> str:
        value = value_of(match[1] or match[2])
        return match[0] if value is None else value

    for word in words:
        if override := form.fullmatch(word):
            text = _VARIABLE.sub(replacement, override[2])
            yield override[1], _of_word(text) if text else COMPUTED


def _of_word(text: str) -> Any:
    """Return a word as YAML; one that is not YAML is text."""
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def _scalar(text: str) -> Any:
    value = _of_word(text) if re.fullmatch(r"[\w.+-]+", text) else text
    return text if isinstance(value, str) or value is None else value


# ---- YAML


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix and tree != {}:
        yield prefix, tree


class _References:
    """Replaces references to other keys, each key once. One to no key, or to itself, stays as it is written."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._written = settings
        self._replaced: dict[str, Any] = {}
        self._open: set[str] = set()  # keys whose references are being replaced
        self._room = MOST

    def replaced(self) -> dict[str, Any]:
        return {key: self._value(key) for key in self._written}

    def _value(self, key: str) -> Any:
        if key not in self._replaced:
            value = self._written[key]
            if isinstance(value, str):
                self._open.add(key)
                whole = _REFERENCE.fullmatch(value)
                text = _REFERENCE.sub(self._text, value)
                value = self._value(whole[1]) if whole and self._is_known(whole[1]) else text
                self._open.remove(key)
            self._replaced[key] = value
        return self._replaced[key]

    def _is_known(self, key: str) -> bool:
        return key in self._written and key not in self._open

    def _text(self, reference: re.Match[str]) -> str:
        text = str(self._value(reference[1])) if self._is_known(reference[1]) else reference[0]
        self._room -= len(text)
        if self._room < 0:
            raise ValueError(f"its references have more than {MOST:,} characters")
        return text

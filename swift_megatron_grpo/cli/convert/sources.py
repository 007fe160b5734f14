"""Read the settings of another trainer from a file, as one flat mapping.

A shell script has them as key=value words (verl, siiRL) or as flags (slime), in commands and in arrays; variables that
the script or the environment sets are replaced. YAML has them nested, with references such as ${data.batch_size}.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from swift_megatron_grpo.cli.check_script.shell import Shell
from swift_megatron_grpo.cli.check_script.stand_ins import read_flags
from swift_megatron_grpo.cli.convert.tables import COMPUTED

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_OVERRIDE = re.compile(r"\+{0,2}([a-zA-Z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
_TRAINER = re.compile(r"(^|/)train\w*\.py$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def read_settings(
    path: Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return key: value. `overrides`: key=value words that come after the file's."""
    text = path.read_text()
    if path.suffix in (".yaml", ".yml"):
        settings = dict(_flatten(yaml.safe_load(text) or {}))
    else:
        settings = dict(_of_script(text, environment))
    settings |= _overrides(overrides, {})
    return {key: _resolve(value, settings, frozenset({key})) for key, value in settings.items()}


def _of_script(script: str, environment: Mapping[str, str] | None) -> Iterator[tuple[str, Any]]:
    """Yield overrides from commands and arrays, and the flags of the command that runs a train*.py."""
    shell = Shell(environment)
    commands = [words for words, _ in shell.run(script)]
    for command in [*shell.arrays.values(), *commands]:
        yield from _overrides(command, shell.variables)
    for command in commands:
        start = next((i for i, word in enumerate(command) if _TRAINER.search(word)), None)
        for name, words in read_flags(command[start + 1 :] if start is not None else []).items():
            values = [_scalar(word) if word else COMPUTED for word in words]
            yield f"--{name.replace('_', '-')}", values if len(values) > 1 else values[0] if values else True


def _overrides(words: Iterable[str], variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        if override := _OVERRIDE.fullmatch(word):
            # Some commands are evaluated, with variables, only after they are assigned.
            text = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), override[2])
            yield override[1], yaml.safe_load(text) if text else COMPUTED


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text) if re.fullmatch(r"[\w.+-]+", text) else text
    return text if isinstance(value, str) or value is None else value


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix and tree != {}:
        yield prefix, tree


def _resolve(value: Any, settings: Mapping[str, Any], seen: frozenset[str]) -> Any:
    """Replace references to other keys. A key that does not exist stays as it is written."""
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and whole[1] in settings and whole[1] not in seen:
        return _resolve(settings[whole[1]], settings, seen | {whole[1]})

    def replace(match: re.Match[str]) -> str:
        known = match[1] in settings and match[1] not in seen
        return str(_resolve(settings[match[1]], settings, seen | {match[1]})) if known else match[0]

    return _REFERENCE.sub(replace, value)

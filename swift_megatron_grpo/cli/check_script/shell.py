"""Read the launches of `megatron rlhf` and `swift rollout` from a shell script, without running the script.

What is read: assignments, `export`, arrays, ${NAME}, ${NAME:-default} and ${NAME:?message}, quotes, continued lines,
comments, command separators and redirections. A substitution of commands, arithmetic or patterns has no value here and
becomes an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"\$(?:([A-Za-z_]\w*)|[@*#?$!0-9])")
_IN_BRACES = re.compile(r"([A-Za-z_]\w*)(\[@\])?(?:(:?[-?])(.*))?", re.DOTALL)
_WRAPPERS = {"exec", "nohup", "env", "time", "sudo"}
COMMANDS = {"rlhf": (("megatron", "rlhf"),), "rollout": (("swift", "rollout"),)}


@dataclass(frozen=True)
class Launch:
    """One command of a script, with the environment that the script gives it."""

    kind: str  # key of COMMANDS
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Words:
    """The commands of a script, and what its variables are at its end."""

    commands: list[list[str]]
    arrays: Mapping[str, list[str]]
    variables: Mapping[str, str]


@dataclass
class _Word:
    """One word as it is read. `values`: what it expands to; several for an array."""

    text: str = ""
    raw: str = ""  # without expansion, to recognize assignments
    quoted: bool = False
    values: list[str] | None = None

    def expand(self) -> list[str]:
        if self.values is not None:
            return self.values
        return [self.text] if self.quoted else self.text.split()


@dataclass
class _State:
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)


def launches(script: str, environment: Mapping[str, str] | None = None) -> list[Launch]:
    """Return the launches in the order of the script. `environment`: the variables that it inherits."""
    reader = _reader(script, environment)
    return [launch for command in reader.commands() if (launch := _launch(command, reader.state)) is not None]


def words_of(script: str, environment: Mapping[str, str] | None = None) -> Words:
    """Return all commands of the script that are no assignments."""
    reader = _reader(script, environment)
    commands = [values for command in reader.commands() if (values := _assign(command, reader.state)[0])]
    return Words(commands, reader.state.arrays, reader.state.variables)


def _reader(script: str, environment: Mapping[str, str] | None) -> _Reader:
    return _Reader(script.replace("\\\n", " "), _State(dict(environment or {}), exported=set(environment or ())))


def _launch(words: list[_Word], state: _State) -> Launch | None:
    """Apply the assignments of a command, and return it if it is a launch."""
    values, local = _assign(words, state)
    given = {name: value for name, value in state.variables.items() if name in state.exported} | local
    for kind, commands in COMMANDS.items():
        for command in commands:
            if tuple(values[: len(command)]) == command:
                return Launch(kind, tuple(values[len(command) :]), given)
    return None


def _assign(words: list[_Word], state: _State) -> tuple[list[str], dict[str, str]]:
    """Apply the assignments of a command. Return its words, and the variables that are set for it alone."""
    local: dict[str, str] = {}
    while words and (assignment := re.match(r"([A-Za-z_]\w*)=", words[0].raw)):
        local[assignment[1]] = words.pop(0).text[assignment.end() :]
    values = [value for word in words for value in word.expand()]
    while values and values[0] in _WRAPPERS:
        values.pop(0)
    if not values:
        state.variables |= local
        return [], {}
    if values[0] in ("export", "declare", "readonly", "local"):
        for value in values[1:]:
            name, equals, text = value.partition("=")
            state.exported.add(name)
            if equals:
                state.variables[name] = text
        return [], {}
    return values, local


class _Reader:
    """Splits a script into simple commands; keywords of loops and conditions are dropped."""

    def __init__(self, script: str, state: _State) -> None:
        self.state = state
        self._text, self._at = script, 0

    def commands(self) -> Iterator[list[_Word]]:
        words: list[_Word] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r":
                self._at += 1
            elif character == "#":
                self._skip_to_end_of_line()
            elif character in "\n;|&()":
                self._at += 1
                if words:
                    yield words
                words = []
            elif character in "<>":
                self._skip_redirection()
            else:
                word = self._word()
                if word.raw.isdigit() and self._text[self._at : self._at + 1] in ("<", ">"):
                    continue  # the descriptor of a redirection
                if word.raw not in ("then", "do", "else", "{", "if", "while", "until"):
                    words.append(word)
        if words:
            yield words

    def _skip_to_end_of_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _skip_redirection(self) -> None:
        while self._text[self._at : self._at + 1] in ("<", ">", "&", " "):
            self._at += 1
        self._word()

    def _word(self) -> _Word:
        word = _Word()
        while self._at < len(self._text) and self._text[self._at] not in " \t\r\n;|&()<>":
            character = self._text[self._at]
            if character == "'":
                self._single_quotes(word)
            elif character == '"':
                self._double_quotes(word)
            elif character == "\\":
                self._append(word, self._text[self._at + 1 : self._at + 2], 2)
            elif character in "$`":
                self._expansion(word)
            else:
                self._append(word, character, 1)
        if word.raw.endswith("=") and self._text[self._at : self._at + 1] == "(":
            self._array(word.raw.rstrip("+="), adds=word.raw.endswith("+="))
            word.values = []
            word.raw = ""
        return word

    def _append(self, word: _Word, text: str, length: int) -> None:
        word.text += text
        word.raw += text
        self._at += length

    def _single_quotes(self, word: _Word) -> None:
        end = self._text.find("'", self._at + 1)
        end = len(self._text) if end < 0 else end
        word.text += self._text[self._at + 1 : end]
        word.raw, word.quoted, self._at = word.raw + "'", True, end + 1

    def _double_quotes(self, word: _Word) -> None:
        word.raw, word.quoted = word.raw + '"', True
        self._at += 1
        while self._at < len(self._text) and self._text[self._at] != '"':
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                word.text += self._text[self._at + 1]
                self._at += 2
            elif character in "$`":
                self._expansion(word)
            else:
                word.text += character
                self._at += 1
        self._at += 1

    def _expansion(self, word: _Word) -> None:
        """Append what a variable, an array or a command substitution expands to."""
        rest = self._text[self._at :]
        word.raw += "$"
        if rest.startswith(("$(", "`")):
            self._at += _length_of_substitution(rest)
            return
        if rest.startswith("${"):
            length = _length_in_brackets(rest, "{", "}")
            self._at += length
            self._braces(word, rest[2 : length - 1])
            return
        match = _PARAMETER.match(rest)
        if match is None:
            word.text += rest[0]
            self._at += 1
            return
        self._at += match.end()
        if match[1] is not None:
            word.text += self.state.variables.get(match[1], "")
        elif match[0] in ("$@", "$*"):  # the script has no arguments
            word.values = []

    def _braces(self, word: _Word, inside: str) -> None:
        """Append what ${inside} expands to."""
        if inside.startswith(("@", "*")):  # the script has no arguments
            word.values = []
        match = _IN_BRACES.fullmatch(inside)
        if match is None:
            return
        name, is_array, operator, default = match.groups()
        if is_array:
            word.values = list(self.state.arrays.get(name, []))
        elif value := self.state.variables.get(name):
            word.text += value
        elif operator and operator.endswith("-") and "$(" not in default:
            word.text += default.strip("\"'")

    def _array(self, name: str, adds: bool) -> None:
        self._at += 1
        values = list(self.state.arrays.get(name, [])) if adds else []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] in " \t\r\n":
                self._at += 1
            elif self._text[self._at] == "#":
                self._skip_to_end_of_line()
            else:
                values += self._word().expand()
        self._at += 1
        self.state.arrays[name] = values


def _length_of_substitution(text: str) -> int:
    """Return the length of `...` or $(...) at the begin of a text, nested ones included."""
    if text[0] == "`":
        end = text.find("`", 1)
        return len(text) if end < 0 else end + 1
    return _length_in_brackets(text, "(", ")")


def _length_in_brackets(text: str, opening: str, closing: str) -> int:
    """Return the length up to the bracket that closes the first one; the text begins with `$` and that one."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == opening) - (character == closing)
        if place > 0 and depth == 0:
            return place + 1
    return len(text)

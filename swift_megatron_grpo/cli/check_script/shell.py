"""Read the launches of `megatron rlhf` and `swift rollout` from a shell script, without running the script.

Bash with stubs on PATH would understand more, but the script's other lines would run: redirections, `rm`, `source` and
absolute paths are out of a stub's reach, and people check scripts that they got from somewhere.

What is read: assignments, `export`, arrays, ${NAME}, ${NAME:-default} and ${NAME:?message}, quotes, continued lines,
comments, command separators and redirections. A command that starts another one is looked through (`srun`, `timeout`),
and so are `bash -c TEXT` and a here-document of a shell or of `sbatch`; other here-documents are data. A substitution
of commands, arithmetic or patterns has no value here and becomes an empty text. What variables expand to is bounded,
because a few lines may double a text for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMMANDS = {("megatron", "rlhf"): "rlhf", ("swift", "megatron", "rlhf"): "rlhf", ("swift", "rollout"): "rollout"}
_MOST = 10_000_000  # characters that the variables of a script expand to
_PROGRAM = re.compile(r"(?:^|[/.])cli[/.](_megatron[/.])?(\w+?)(?:\.py)?$")  # of ms-swift: a file or a module
_LAUNCHER = re.compile(r"(?:(?:^|/)(?:python[\d.]*|torchrun)|^-m)$")
_SIZES = {"nproc_per_node": "NPROC_PER_NODE", "nnodes": "NNODES"}  # flags of torchrun, and what `megatron` reads
# Commands that start the command after their own options, which may have values: only the launch itself is looked for.
_WRAPPERS = {
    "exec", "nohup", "env", "time", "sudo", "command", "srun", "timeout", "nice", "ionice", "numactl", "taskset",
    "setsid", "stdbuf", "systemd-run", "mpirun", "mpiexec", "docker", "podman", "singularity", "apptainer", "enroot",
    "conda", "mamba", "micromamba", "uv", "poetry", "pixi", "nsys", "ncu", "py-spy", "ray",
}  # fmt: skip
_SHELLS = {"bash", "sh", "dash", "ksh", "zsh"}
_TEXT = re.compile(r"-[a-z]*c")  # the option of a shell before a script
_DECLARATIONS = {"export", "declare", "readonly", "local"}
_KEYWORDS = {"then", "do", "else", "elif", "{", "if", "while", "until", "!"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)\)", re.DOTALL)
_REDIRECTION = re.compile(r"\d*[<>]+&?[ \t]*")
_HERE = re.compile(r"\d*<<(-?)[ \t]*(?=[^<\s])")
_ESCAPED_HERE = re.compile(r"\\([$`\\])")
_PARAMETER = re.compile(r"\$(?:[A-Za-z_]\w*|[@*#?$!0-9-])")
_ESCAPED = re.compile(r'\\["\\$`]')  # in double quotes
_IN_BRACES = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?:(:?[-?])(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """One command of a script, with the environment that the script gives it."""

    kind: str  # rlhf, rollout
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def launches(script: str, environment: Mapping[str, str] | None = None) -> list[Launch]:
    """Return the launches of a script that is started in this environment, in order."""
    found = []
    for words, given in Shell(environment).run(script):
        typed, sizes = _as_typed(words)
        for command, kind in COMMANDS.items():
            if tuple(typed[: len(command)]) == command:
                known = {name: size for name, size in sizes.items() if size.isdigit() or name not in given}
                found.append(Launch(kind, tuple(typed[len(command) :]), given | known))
    return found


def _as_typed(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command as `megatron ...` or `swift ...`, and the sizes that its launcher sets.

    torchrun and Python may start the file or the module of ms-swift that these two commands start.
    """
    for place, word in enumerate(words):
        if (program := _PROGRAM.search(word)) and any(map(_LAUNCHER.search, words[:place])):
            name = [] if program[2] == "main" else [program[2]]
            return ["megatron" if program[1] else "swift", *name, *words[place + 1 :]], dict(_sizes(words[:place]))
    return [words[0].rsplit("/", 1)[-1], *words[1:]], {}


def _sizes(launcher: list[str]) -> Iterator[tuple[str, str]]:
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("-") and (size := _SIZES.get(name.lstrip("-").replace("-", "_"))):
            yield size, value if equals else following


class Shell:
    """The variables and arrays of a script while its commands are read."""

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        self.variables = dict(environment or {})
        self.arrays: dict[str, list[str]] = {}
        self._exported = set(self.variables)
        self._room = _MOST

    def value_of(self, name: str) -> str | None:
        value = self.variables.get(name)
        return None if value is None else self._counted(value)

    def run(self, script: str) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Apply the assignments of the script, and yield every other command with its environment."""
        for words in _commands(script.replace("\\\n", " ")):
            local: dict[str, str] = {}
            while words and (match := _ASSIGNMENT.match(words[0])):
                word = words.pop(0)
                if array := _ARRAY.fullmatch(word):
                    self._set_array(*array.groups())
                else:
                    before = self.value_of(match[1]) if match[2] else None
                    local[match[1]] = (before or "") + "".join(self._expand(word[match.end() :], splits=False))
            if words and words[0] in _DECLARATIONS:
                self._declare(words[1:])
                continue
            values = [value for word in words for value in self._expand(word)]
            while values and _program_of(values[0]) in _WRAPPERS:
                started = _start_of_launch(values)
                given = filter(_ASSIGNMENT.match, values[:started])  # env A=1
                local |= {name: text for name, _, text in (word.partition("=") for word in given)}
                values = values[started:]
            if (text := _text_of_shell(values)) is not None:
                for inner, environment in self.run(text):
                    yield inner, environment | local
            elif values:
                yield values, {name: self.variables[name] for name in self._exported & {*self.variables}} | local
            else:
                self.variables |= local

    def _declare(self, words: list[str]) -> None:
        for word in words:
            if array := _ARRAY.fullmatch(word):
                self._set_array(*array.groups())
                continue
            for value in self._expand(word):
                name, equals, text = value.partition("=")
                self._exported.add(name)
                if equals:
                    self.variables[name] = text

    def _set_array(self, name: str, adds: str, inside: str) -> None:
        values = [value for words in _commands(inside, " \t\r\n") for word in words for value in self._expand(word)]
        if adds:
            self.arrays.setdefault(name, []).extend(values)
        else:
            self.arrays[name] = values

    def _expand(self, word: str, splits: bool = True) -> list[str]:
        """Return the values of a word: several for an array, or for an unquoted variable with blanks."""
        text, quoted = "", not splits
        for part in _parts(word):
            if part[0] == "'":
                text, quoted = text + part[1:-1], True
            elif part[0] == '"':
                pieces = _parts(part[1:-1], in_quotes=True)
                inside = [piece[1:] if _ESCAPED.fullmatch(piece) else self._value(piece) for piece in pieces]
                if any(isinstance(value, list) for value in inside):
                    return [value for values in inside if isinstance(values, list) for value in values]
                text, quoted = text + "".join(map(str, inside)), True
            elif part[0] == "\\":
                text += part[1:]
            else:
                value = self._value(part)
                if isinstance(value, list):
                    return value
                text += value
        return [text] if quoted else text.split()

    def _value(self, part: str) -> str | list[str]:
        """Return what a variable or an array holds; text is returned as it is. The script has no arguments."""
        if part[0] not in "$`" or part == "$":
            return part
        if not part.startswith("${"):
            return [] if part in ("$@", "$*") else self.value_of(part[1:]) or ""
        if part[2:3] in ("@", "*"):
            return []
        match = _IN_BRACES.fullmatch(part[2:-1])
        if match is None:
            return ""
        name, is_array, operator, default = match.groups()
        if is_array:
            return [self._counted(value) for value in self.arrays.get(name, [])]
        if (value := self.value_of(name)) or not (operator or "").endswith("-") or "$(" in default:
            return value or ""
        return str(default.strip("\"'"))

    def _counted(self, value: str) -> str:
        self._room -= 1 + len(value)
        if self._room < 0:
            raise ValueError(f"the variables of the script expand to more than {_MOST:,} characters")
        return value


def _program_of(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _start_of_launch(values: list[str]) -> int:
    """Return where the command begins that a wrapper starts: the one that is looked for, else after plain options."""
    for place in range(1, len(values)):
        typed = (_program_of(values[place]), *values[place + 1 :])
        if _LAUNCHER.search(values[place]) or _text_of_shell(typed) is not None:
            return place
        if any(typed[: len(command)] == command for command in COMMANDS):
            return place
    are_own = (word.startswith("-") or _ASSIGNMENT.match(word) is not None for word in values[1:])
    return next((place for place, is_own in enumerate(are_own, start=1) if not is_own), len(values))


def _text_of_shell(values: Sequence[str]) -> str | None:
    """Return the script in `bash -c SCRIPT`; None: this is another command."""
    if not values or _program_of(values[0]) not in _SHELLS:
        return None
    for place, word in enumerate(values[1:-1], start=1):
        if _TEXT.fullmatch(word):
            return values[place + 1]
        if not word.startswith(("-", "+")) and not values[place - 1].endswith("o"):  # -o pipefail
            return None
    return None


def _reads_script(words: Sequence[str]) -> bool:
    """Return True if what a command, as written, reads from its standard input is a script."""
    for place, word in enumerate(words):
        if _program_of(word) == "sbatch":
            return True
        if _program_of(word) in _SHELLS:
            return all(each.startswith("-") for each in words[place + 1 :])
    return False


class _Here(NamedTuple):
    """A here-document that begins after the line."""

    end: str  # its last line
    is_indented: bool  # <<-
    is_literal: bool  # <<'EOF'
    is_script: bool = False

    @classmethod
    def at(cls, script: str, match: re.Match[str]) -> tuple[_Here, int]:
        """Return the here-document whose operator is here, and where its word ends."""
        end = _end_of_word(script, match.end())
        word = script[match.end() : end]
        name = re.sub(r"[\"'\\]", "", word)
        return cls(name, bool(match[1]), name != word), end

    def read(self, script: str, at: int) -> tuple[str, int]:
        """Return its text, which begins here, and its end. Without a last line it is none: `((1 << 2))`."""
        blanks = r"\t*" if self.is_indented else ""
        match = re.compile(rf"^{blanks}{re.escape(self.end)}$", re.MULTILINE).search(script, at)
        if match is None:
            return "", at
        text = script[at : match.start()]
        return text if self.is_literal else _ESCAPED_HERE.sub(r"\1", text), match.end()


def _commands(script: str, blanks: str = " \t\r") -> Iterator[list[str]]:
    """Yield the words of each simple command, as they are written; keywords of loops and conditions are dropped."""
    words: list[str] = []
    documents: list[_Here] = []
    at = 0
    while at < len(script):
        if script[at] in blanks:
            at += 1
        elif script[at] == "#":
            at = _find(script, "\n", at)
        elif script[at] in "\n;|&()":
            if words:
                yield words
            at += 1
            words = []
            if script[at - 1] == "\n":
                for document in documents:
                    text, at = document.read(script, at)
                    if document.is_script:
                        yield from _commands(text)
                documents = []
        elif here := _HERE.match(script, at):
            document, at = _Here.at(script, here)
            documents.append(document._replace(is_script=_reads_script(words)))
        elif redirection := _REDIRECTION.match(script, at):
            at = _end_of_word(script, redirection.end())
        else:
            end = _end_of_word(script, at)
            if words or script[at:end] not in _KEYWORDS:
                words.append(script[at:end])
            at = end
    if words:
        yield words


def _end_of_word(script: str, at: int) -> int:
    start = at
    while at < len(script) and script[at] not in " \t\r\n;|&<>)":
        if script[at] == "(":
            if not _ASSIGNMENT.fullmatch(script[start:at]):
                break
            at = _end_of_array(script, at + 1)
        else:
            at = _end_of_part(script, at, in_quotes=False)
    return max(at, start + 1)


def _end_of_array(script: str, at: int) -> int:
    while at < len(script) and script[at] != ")":
        if script[at] == "#":
            at = _find(script, "\n", at)
        else:
            at = at + 1 if script[at] in " \t\r\n" else _end_of_word(script, at)
    return at + 1


def _parts(word: str, in_quotes: bool = False) -> Iterator[str]:
    """Yield quotes, expansions, escapes and single letters of a word."""
    at = 0
    while at < len(word):
        end = _end_of_part(word, at, in_quotes)
        yield word[at:end]
        at = end


def _end_of_part(text: str, at: int, in_quotes: bool) -> int:
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "`" or (text[at] == "'" and not in_quotes):
        return _find(text, text[at], at + 1) + 1
    if text[at] == '"' and not in_quotes:
        at += 1
        while at < len(text) and text[at] != '"':
            at = _end_of_part(text, at, in_quotes=True)
        return at + 1
    if text.startswith(("$(", "${"), at):
        return _end_of_brackets(text, at + 1, "()" if text[at + 1] == "(" else "{}")
    match = _PARAMETER.match(text, at)
    return match.end() if match else at + 1


def _end_of_brackets(text: str, at: int, brackets: str) -> int:
    """Return the end of the bracket that opens here, nested ones included."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == brackets[0]) - (text[place] == brackets[1])
        if depth == 0:
            return place + 1
    return len(text)


def _find(text: str, wanted: str, start: int) -> int:
    place = text.find(wanted, start)
    return len(text) if place < 0 else place

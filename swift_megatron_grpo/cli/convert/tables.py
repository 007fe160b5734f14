"""A table of the keys of another trainer, and its application to the settings of a file."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

Flags = Mapping[str, Any]
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?|-inf")
COMPUTED = "(computed by the script)"  # a value that is known only while the script runs


class NoCounterpart(ValueError):
    """A value that this package cannot express; the message has the reason."""


class Undecided(ValueError):
    """A setting that needs a decision because of its value; the message has what to do."""


class Needless(NamedTuple):
    """A setting without a counterpart, because the result is the same without it."""

    why: str


class ByHand(NamedTuple):
    """A setting that needs a decision or a file of the user."""

    what: str


class Computed(NamedTuple):
    """Flags that follow from a value."""

    flags: Sequence[str]  # that `rule` may return
    rule: Callable[[Any], Flags]


class Together:
    """Flags that follow from several settings. `rule` gets the values that are set, under the names of `keys`."""

    def __init__(self, rule: Callable[..., Flags], flags: str, reads: Mapping[str, str] = {}, **keys: str) -> None:
        self.rule, self.flags, self.keys = rule, flags.split(), keys
        self.reads = reads  # keys of other rules that it gets as well


Rule = str | Needless | ByHand | Computed  # a text names the flags that get the same value


@dataclass(frozen=True, slots=True)
class Table:
    """Rules by key. A key may contain * for any text; the first rule that fits counts."""

    name: str  # of the trainer
    marks: tuple[str, ...]  # beginnings of keys that no other trainer has
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]  # of the trainer, where ms-swift has others
    together: Sequence[Together] = ()
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # the settings of a file
    shares_flags: bool = False  # True: any other key is a flag of the same name

    def rule(self, key: str) -> Rule | None:
        if key in self.rules:
            return self.rules[key]
        found = next((rule for pattern, rule in self.rules.items() if fnmatchcase(key, pattern)), None)
        return key if found is None and self.shares_flags else found


@dataclass(slots=True)
class Conversion:
    """Flags and variables of a script, and the settings that became none."""

    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the words of each
    environment: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)  # key: why
    by_hand: dict[str, str] = field(default_factory=dict)  # key and value: what to do
    unknown: dict[str, str] = field(default_factory=dict)  # key: its value, with the reason if there is one

    def add(self, flags: Flags) -> None:
        """Add flags, and environment variables, whose names are in capitals."""
        words = {name: words_of(value) for name, value in flags.items() if value is not None}
        self.environment |= {name: " ".join(values) for name, values in words.items() if name.isupper()}
        self.flags |= {name: values for name, values in words.items() if not name.isupper()}


def convert(settings: Mapping[str, Any], table: Table) -> Conversion:
    """Apply a table to all settings; those of the file come before the trainer's defaults."""
    conversion = Conversion()
    complete = {**table.defaults, **table.prepare(settings)}
    grouped = {key for group in table.together for key in group.keys.values()}
    for key, value in complete.items():
        if key in grouped or value is None:
            continue
        match table.rule(key):
            case None:
                conversion.unknown[key] = text_of(value)
            case str(names):
                _apply(conversion, {key: value}, names.split(), partial(dict.fromkeys, names.split(), value))
            case Needless(why):
                conversion.needless[key] = why
            case ByHand(what):
                conversion.by_hand[f"{key}={text_of(value)}"] = what
            case Computed(flags, rule):
                _apply(conversion, {key: value}, flags, partial(rule, value))
    for group in table.together:
        if chosen := {key: complete[key] for key in group.keys.values() if complete.get(key) is not None}:
            named = {**group.keys, **group.reads}.items()
            values = {name: complete[key] for name, key in named if key in complete}
            _apply(conversion, chosen, group.flags, partial(group.rule, **values))
    if not {"reward_funcs", "teacher_model", "use_gym_env"} & conversion.flags.keys():
        conversion.by_hand.setdefault("reward functions", "name them with --reward_funcs")
    return conversion


def _apply(
    conversion: Conversion, settings: Mapping[str, Any], flags: Sequence[str], rule: Callable[[], Flags]
) -> None:
    if COMPUTED in settings.values():
        names = " ".join(name if name.isupper() else f"--{name}" for name in flags)
        conversion.by_hand |= {f"{key}={text_of(value)}": f"set {names}" for key, value in settings.items()}
        return
    try:
        conversion.add(rule())
    except Undecided as what:
        conversion.by_hand |= {f"{key}={text_of(value)}": str(what) for key, value in settings.items()}
    except NoCounterpart as reason:
        conversion.unknown |= {key: f"{text_of(value)}: {reason}" for key, value in settings.items()}
    except (TypeError, ValueError, LookupError, ArithmeticError):
        conversion.unknown |= {key: f"{text_of(value)}: not a value of {key}" for key, value in settings.items()}


def choice(values: Mapping[str, Flags], otherwise: str = "there is no such choice here") -> Computed:
    """Return a rule that maps each value to flags."""

    def rule(value: Any) -> Flags:
        try:
            return values[text_of(value)]
        except KeyError:
            raise NoCounterpart(otherwise) from None

    return Computed(list(dict.fromkeys(name for flags in values.values() for name in flags)), rule)


def values_of(flag: str, names: str, otherwise: str = "there is no such choice here") -> Computed:
    """Return a rule for values of one flag: `value` stays, `value:other` is renamed, `value:` needs no flag."""
    pairs = (word.partition(":") for word in names.split())
    return choice(
        {value: {flag: other or value} if other or not colon else {} for value, colon, other in pairs}, otherwise
    )


def flags(prefix: str, names: str) -> dict[str, Rule]:
    """Return rules for keys that are flags of the same name, or with `key:flag` of another name."""
    pairs = (word.partition(":") for word in names.split())
    return {f"{prefix}{key}": flag or key for key, _, flag in pairs}


def each(prefix: str, names: str, rule: Rule) -> dict[str, Rule]:
    return {f"{prefix}{name}": rule for name in names.split()}


def when_positive(flag: str) -> Rule:
    """Return a rule for trainers whose -1 or 0 means that the setting is off."""
    return Computed([flag], lambda value: {flag: value} if value > 0 else {})


def whole(value: Any) -> int:
    """Return a whole number; anything else has no counterpart."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise NoCounterpart("not a whole number")
    return value


def words_of(value: Any) -> tuple[str, ...]:
    """Return the words of a flag: one, or those of a list. None of them may be taken for another flag."""
    words = tuple(map(text_of, value)) if isinstance(value, list | tuple) else (text_of(value),)
    if not words:
        raise NoCounterpart("it is empty")
    for word in words:
        if word == COMPUTED:
            raise NoCounterpart("a part of it is computed by the script")
        if not word.isprintable():
            raise NoCounterpart("it has line breaks or other control characters")
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            raise NoCounterpart("it begins with a dash, as a flag does")
    return words


def text_of(value: Any) -> str:
    """Write a value as people read it."""
    if isinstance(value, list | tuple):
        return " ".join(map(text_of, value))
    return str(value).lower() if isinstance(value, bool) else str(value)

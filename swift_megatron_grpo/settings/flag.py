"""Describe flags: one class per stage, whose fields are the flags that the stage reads.

    class TimeLimits(Flags):
        stop_grace: Annotated[float, Above(0, use=120)] = flag(120.0, "Time between ...")  # added here
        ddp_timeout: Annotated[int, AtLeast(1, use=18000000)]  # ms-swift's: it has a default, and gets a range here
        tau_pos: float = 1.0  # ms-swift's, with its default, where this package reads that as well
        rollout_only: bool  # described in another class, and read here
        loss_type: Annotated[str, OneOf(CLIPS_RATIO)] = "grpo"  # the keys of a table, to which plugins add theirs

        @rule
        def ends_in_time(self) -> Faults:
            if ...:
                yield "--stop_grace ...: why; use --stop_grace 120"

A rule's parameters are fields of Facts in settings/layout.py. It runs as soon as they are known: without one or with
`layout` before ms-swift resolves the flags, with `config` or `shape` once the model's config.json is read, with `rows`
once the datasets are. `@rule_as_typed` judges only what the user has typed. All faults of a moment are one error.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

from swift_megatron_grpo.settings.layout import Facts

Faults = Iterator[str]
Rule = TypeVar("Rule", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Range:
    """The valid values of a number, and one of them to suggest."""

    low: float
    use: float | str  # as a user types it
    high: float = math.inf
    above_low: bool = False  # True: `low` itself is not valid
    below_high: bool = False  # True: `high` itself is not valid
    why: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.above_low else value >= self.low
        below = value < self.high if self.below_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"{'above' if self.above_low else 'at least'} {_typed(self.low)}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.below_high else 'at most'} {_typed(self.high)}"


def AtLeast(low: float, *, use: float | str, why: str = "") -> Range:
    return Range(low, use, why=why)


def Above(low: float, *, use: float | str, why: str = "") -> Range:
    return Range(low, use, above_low=True, why=why)


@dataclass(frozen=True, slots=True)
class OneOf:
    """The valid values of a text, as far as they are known by now: plugins may add to them."""

    known: Collection[str]


def flag(default: Any, help: str, *, example: str = "") -> Any:
    """Describe a flag that this package adds to ms-swift's; `example`: a value for docs/flags.md."""
    return dataclasses.field(default=default, metadata={"flag": {"help": help, "example": example}})


def rule(method: Rule) -> Rule:
    """Mark a method that yields a message for every fault, or raises a ValueError."""
    method.__dict__["rule"] = False
    return method


def rule_as_typed(method: Rule) -> Rule:
    """Mark a rule that judges only what the user has typed, and not what ms-swift has filled in since."""
    method.__dict__["rule"] = True
    return method


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Flags:
    """The flags of one stage, with their ranges and rules: subclasses are frozen dataclasses."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def of(cls, values: Mapping[str, Any], **derived: Any) -> Self:
        """Select the flags of this class from all, by name, also those of a field's class. `derived`: other fields."""
        kinds = {name: kind for name, kind in _read(cls).hints.items() if name not in derived}
        flags = {name: kind.of(values) if is_group(kind) else values[name] for name, kind in kinds.items()}
        return cls(**flags, **derived)

    def changed(self, prefix: str = "") -> list[str]:
        """Return the flags, such as --top_p, that differ from the defaults that this class states."""
        changed = []
        for field in dataclasses.fields(self):
            known = field.default is not MISSING or field.default_factory is not MISSING
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if known and field.name.startswith(prefix) and getattr(self, field.name) not in (default, {}):
                changed.append(f"--{field.name}")
        return changed

    def faults(self, facts: Facts) -> Faults:
        """Yield a message for every fault that shows with these facts."""
        yield from self._choice_faults()
        yield from self._range_faults()
        yield from self._finite_faults()
        for method, names, before_resolution in _read(type(self)).rules:
            known = {name: getattr(facts, name) for name in names}
            if None in known.values() or (before_resolution and not facts.typed):
                continue
            try:
                yield from method(self, **known) or ()
            except ValueError as fault:
                yield str(fault)

    def _choice_faults(self) -> Faults:
        for name, known in _read(type(self)).choices.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                yield f"--{name} {value}: unknown value; use --{name} {' or '.join(map(str, known))}"

    def _range_faults(self) -> Faults:
        for name, (valid, optional) in ranges(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value not in valid:
                why, advice = f": {valid.why}" if valid.why else "", ", or leave it out" if optional else ""
                yield f"--{name} {_typed(value)} must be {valid}{why}; use --{name} {valid.use}{advice}"

    def _finite_faults(self) -> Faults:
        for name in _read(type(self)).hints.keys() - ranges(type(self)).keys():
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                yield f"--{name} {value:g} must be a finite number; leave it out for its default"


def is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Flags)


@dataclass(frozen=True, slots=True)
class _Class:
    """The contents of the annotations and methods of a class of flags."""

    hints: Mapping[str, Any]  # the types of its fields, without ranges
    ranges: Mapping[str, tuple[Range, bool]]  # by flag, each with whether the flag may be left unset (None)
    choices: Mapping[str, Collection[Any]]  # by flag
    # each with the facts that it needs, and whether it holds only before ms-swift resolves the flags
    rules: Sequence[tuple[Callable[..., Any], tuple[str, ...], bool]]


_CLASSES: dict[Any, _Class] = {}  # reading annotations takes longer than all rules


def _read(group: Any) -> _Class:
    if group not in _CLASSES:
        hints = typing.get_type_hints(group)
        found = {}
        choices: dict[str, Collection[Any]] = {name: _literals(hint) for name, hint in hints.items() if _literals(hint)}
        for name, hint in typing.get_type_hints(group, include_extras=True).items():
            if typing.get_origin(hint) is Annotated:
                [valid] = hint.__metadata__
                if isinstance(valid, OneOf):
                    choices[name] = valid.known
                else:
                    found[name] = (valid, NoneType in typing.get_args(hint.__origin__))
        methods = [method for method in vars(group).values() if "rule" in getattr(method, "__dict__", ())]
        rules = [(m, tuple(inspect.signature(m).parameters)[1:], m.__dict__["rule"]) for m in methods]
        _CLASSES[group] = _Class(hints, found, choices, rules)
    return _CLASSES[group]


def _literals(hint: Any) -> list[Any]:
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is Literal]
    return [choice for kind in kinds for choice in typing.get_args(kind)]


def ranges(group: type[Flags]) -> Mapping[str, tuple[Range, bool]]:
    """Return the ranges of a class by flag, each with whether the flag may be left unset (None)."""
    return _read(group).ranges


def faults_of(check: Callable[..., object], *arguments: Any) -> Faults:
    """Yield the message of the ValueError that a check raises."""
    try:
        check(*arguments)
    except ValueError as fault:
        yield str(fault)


def raise_faults(faults: Iterable[str]) -> None:
    """Raise one ValueError with all faults, each once, so that a user sees all of them together."""
    lines = "\n".join(dict.fromkeys(faults))
    if lines:
        raise ValueError(lines)


def parser_class(base: Any, groups: Iterable[type[Flags]]) -> Any:
    """Return ms-swift's dataclass with the flags that these classes add, as its parser expects them.

    HfArgumentParser takes plain types and hands all metadata to argparse, which knows `help`.
    """
    added = []
    for group in groups:
        for field in dataclasses.fields(group):
            if "flag" in field.metadata:
                plain = dataclasses.field(default=field.default, metadata={"help": field.metadata["flag"]["help"]})
                added.append((field.name, _read(group).hints[field.name], plain))
    return dataclasses.make_dataclass("AddedFlags", added, bases=(base,), namespace={"__module__": __name__})


def as_typed(value: Any) -> str:
    """Return a flag's value as a user types it on the command line."""
    if isinstance(value, list):
        return " ".join(as_typed(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return value.name if isinstance(value, Enum) else str(value)


def _typed(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

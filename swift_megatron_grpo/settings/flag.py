"""Describe flags: one class per stage, whose fields are the flags that the stage reads.

    @dataclass(frozen=True, kw_only=True)
    class TimeLimits(Flags):
        stop_grace: Annotated[float, Above(0, use=120)] = flag(120.0, "Time between ...")  # added here
        ddp_timeout: Annotated[int, AtLeast(1, use=18000000)]  # ms-swift's: it has a default, and gets a range here
        rollout_only: bool  # described in another class, and read here

        @rule
        def ends_in_time(self) -> Faults:
            if ...:
                yield "--stop_grace ...: why; use --stop_grace 120"

A rule's parameters are fields of settings/facts.py. It runs as soon as they are known: without one or with `layout`
before ms-swift resolves the flags, with `config` or `shape` once the model's config.json is read, with `rows` once the
datasets are. `@rule(before_resolution=True)` judges only what the user has typed. All faults of a moment are one error.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints, overload

from swift_megatron_grpo.settings.facts import Facts

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


def flag(default: Any, help: str, *, example: str = "") -> Any:
    """Describe a flag that this package adds to ms-swift's; `example`: a value for docs/flags.md."""
    return dataclasses.field(default=default, metadata={"flag": {"help": help, "example": example}})


@overload
def rule(method: Rule, /) -> Rule: ...
@overload
def rule(*, before_resolution: bool) -> Callable[[Rule], Rule]: ...
def rule(method: Any = None, /, *, before_resolution: bool = False) -> Any:
    """Mark a method that yields a message for every fault, or raises a ValueError.

    With `before_resolution` it judges only what the user has typed, and not what ms-swift has filled in since.
    """

    def mark(marked: Rule) -> Rule:
        marked.__dict__["rule"] = before_resolution
        return marked

    return mark if method is None else mark(method)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of one stage, with their ranges and rules."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Select the flags of this class from all flags, by name; a field may be the class of another stage."""
        kinds = _read(cls).hints
        return cls(**{name: kinds[name].of(values) if is_group(kinds[name]) else values[name] for name in kinds})

    def faults(self, facts: Facts) -> Faults:
        """Yield a message for every fault that shows with these facts."""
        yield from self._choice_faults()
        yield from self._range_faults()
        for method, names, before_resolution in _read(type(self)).rules:
            known = {name: getattr(facts, name) for name in names}
            if None in known.values() or (before_resolution and not facts.typed):
                continue
            try:
                yield from method(self, **known) or ()
            except ValueError as fault:
                yield str(fault)

    def _choice_faults(self) -> Faults:
        for name, hint in _read(type(self)).hints.items():
            known = [
                choice for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for choice in get_args(kind)
            ]
            value = getattr(self, name)
            if known and value is not None and value not in known:
                yield f"--{name} {value}: unknown value; use --{name} {' or '.join(map(str, known))}"

    def _range_faults(self) -> Faults:
        for name, (valid, optional) in ranges(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value not in valid:
                why, advice = f": {valid.why}" if valid.why else "", ", or leave it out" if optional else ""
                yield f"--{name} {_typed(value)} must be {valid}{why}; use --{name} {valid.use}{advice}"


def is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Flags)


@dataclass(frozen=True, slots=True)
class _Class:
    """The contents of the annotations and methods of a class of flags."""

    hints: Mapping[str, Any]  # the types of its fields, without ranges
    ranges: Mapping[str, tuple[Range, bool]]  # by flag, each with whether the flag may be left unset (None)
    # each with the facts that it needs, and whether it holds only before ms-swift resolves the flags
    rules: Sequence[tuple[Callable[..., Any], tuple[str, ...], bool]]


_CLASSES: dict[Any, _Class] = {}  # reading annotations takes longer than all rules


def _read(group: Any) -> _Class:
    if group not in _CLASSES:
        found = {}
        for name, hint in get_type_hints(group, include_extras=True).items():
            if get_origin(hint) is Annotated:
                [valid] = (extra for extra in hint.__metadata__ if isinstance(extra, Range))
                found[name] = (valid, NoneType in get_args(hint.__origin__))
        methods = [method for method in vars(group).values() if "rule" in getattr(method, "__dict__", ())]
        rules = [(m, tuple(inspect.signature(m).parameters)[1:], m.__dict__["rule"]) for m in methods]
        _CLASSES[group] = _Class(get_type_hints(group), found, rules)
    return _CLASSES[group]


def ranges(group: type[Flags]) -> Mapping[str, tuple[Range, bool]]:
    """Return the ranges of a class by flag, each with whether the flag may be left unset (None)."""
    return _read(group).ranges


def check(groups: Iterable[type[Flags]], values: Mapping[str, Any], facts: Facts) -> None:
    """Raise one ValueError with all faults of this moment."""
    faults = [fault for group in groups for fault in group.of(values).faults(facts)]
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))


def check_finite(
    values: Mapping[str, Any], flags: Iterable[dataclasses.Field[Any]], described: Collection[str]
) -> None:
    """Raise ValueError for any flag without a range that is NaN or infinite."""
    faults = []
    for field in flags:
        name, value = field.name, values[field.name]
        numbers = value if isinstance(value, list) else [value]
        infinite = [number for number in numbers if isinstance(number, float) and not math.isfinite(number)]
        if infinite and name not in described:
            is_number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
            advice = f"use --{name} {field.default}" if is_number else "use a finite value, or leave it out"
            faults.append(f"--{name} {infinite[0]} is not a finite number; {advice}")
    if faults:
        raise ValueError("\n".join(sorted(faults)))


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

"""Read the arguments of TRL's calls from a Python program, without running it.

A name has the value of the last assignment above its use, whatever branch or function that is in. What only the
program can know, such as what an argument parser returns, is COMPUTED.
"""

import ast
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from swift_megatron_grpo.cli.convert.tables import COMPUTED

_TRAINER, _CONFIG = "GRPOTrainer", "GRPOConfig"
_POSITIONS = {  # names of positional arguments
    _TRAINER: ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    _CONFIG: ("output_dir",),
    "LoraConfig": (),
}
_PREFIXES = {_TRAINER: f"{_TRAINER}.", _CONFIG: "", "LoraConfig": "LoraConfig."}  # of keys
_READ_ELSEWHERE = ("args", "peft_config")  # their calls are read themselves
_MOST_PARTS = 1_000_000


def settings_of_program(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of GRPOConfig by their names; those of GRPOTrainer and LoraConfig have its name in front."""
    try:
        program = _Program(ast.parse(text))
    except (SyntaxError, MemoryError) as error:  # the second for what is nested too deeply
        raise ValueError(f"not a Python program: {error}") from error
    yield from program.settings()


class _Binding(NamedTuple):
    """A place that gives a name a value."""

    line: int  # where it ends
    until: float  # last line on which it counts
    value: ast.expr | None  # None if only the program can know it


class _Program:
    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))  # parents before their children
        self._bindings: dict[str, list[_Binding]] = defaultdict(list)
        self._room = _MOST_PARTS
        values: dict[ast.expr, ast.expr | None] = {}
        for node in self._nodes:
            match node:
                case ast.Assign(targets, value):
                    values |= dict.fromkeys(targets, value)
                case ast.AnnAssign(target, _, value):
                    values[target] = value
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    for argument in ast.walk(node.args):
                        if isinstance(argument, ast.arg):
                            self._bindings[argument.arg].append(_Binding(node.lineno - 1, node.end_lineno or 0, None))
                case ast.Name(name, ast.Store()):
                    value = values.get(node)
                    end = node.lineno if value is None else value.end_lineno or 0
                    self._bindings[name].append(_Binding(end, math.inf, value))

    def settings(self) -> Iterator[tuple[str, Any]]:
        for node in self._nodes:
            match node:
                case ast.Call() if (kind := _name(node)) in _POSITIONS:
                    if kind == "LoraConfig":
                        yield "LoraConfig.r", 8  # unless it is given
                    for name, value in self._arguments(node, kind):
                        yield from self._setting(kind, name, value)
                case ast.Assign(targets=[ast.Attribute(value=ast.Name() as owner, attr=name)]):  # config.beta = 0.04
                    if isinstance(call := self._assigned_to(owner), ast.Call) and _name(call) == _CONFIG:
                        yield name, self._value(node.value)

    def _arguments(self, call: ast.Call, kind: str) -> Iterator[tuple[str, ast.expr]]:
        yield from zip(_POSITIONS[kind], call.args, strict=False)
        for keyword in call.keywords:
            values = self._assigned_to(keyword.value)
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
            elif isinstance(values, ast.Dict) and all(isinstance(key, ast.Constant) for key in values.keys):
                yield from (
                    (str(self._value(key)), value) for key, value in zip(values.keys, values.values, strict=True)
                )
            else:
                yield f"**{ast.unparse(keyword.value)}", keyword.value

    def _setting(self, kind: str, name: str, node: ast.expr) -> Iterator[tuple[str, Any]]:
        key = f"{_PREFIXES[kind]}{name}"
        if name.endswith("_dataset"):
            changes: dict[str, str] = {}
            yield key, self._dataset(node, changes)
            yield from ((f"{key}.{change}", what) for change, what in changes.items())
            return
        if name == "reward_funcs":
            node = self._assigned_to(node)
            functions = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
            yield key, [f.value if isinstance(f, ast.Constant) else ast.unparse(f) for f in functions]
            return
        made = self._assigned_to(node)
        of_call = made if isinstance(made, ast.Call) else None
        if name in _READ_ELSEWHERE and of_call is not None and _name(of_call) in _POSITIONS:
            return
        yield key, self._value(node)
        if name == "model" and of_call is not None and of_call.keywords:
            yield "model_init_kwargs", {str(option.arg): self._value(option.value) for option in of_call.keywords}

    def _assigned_to(self, node: ast.expr | None) -> Any:
        """Return what is assigned to a name; another expression is returned as it is."""
        while isinstance(node, ast.Name):
            self._spend(1 + len(self._bindings[node.id]))
            above = [each for each in self._bindings[node.id] if each.line < node.lineno <= each.until]
            value = max(above, key=lambda each: each.line).value if above else None
            if value is None:
                return node
            node = value
        return node

    def _value(self, node: ast.expr | None) -> Any:
        self._spend()
        match node:
            case ast.Constant(value):
                return value
            case ast.Name():
                value = self._assigned_to(node)
                return COMPUTED if isinstance(value, ast.Name) else self._value(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return -number
            case ast.List(parts) | ast.Tuple(parts) | ast.Set(parts):
                values = [self._value(part) for part in parts]
                return COMPUTED if COMPUTED in values else values
            case ast.Dict(keys, parts):
                return {str(self._value(key)): self._value(part) for key, part in zip(keys, parts, strict=True)}
            case ast.Attribute(ast.Name("torch"), name):  # torch.bfloat16
                return name
            case ast.Call(args=[first, *_]) if _name(node) == "from_pretrained":
                return self._value(first)
        return COMPUTED

    def _dataset(self, node: ast.expr | None, changes: dict[str, str]) -> Any:
        """Return the name of a dataset; `changes` gets what it cannot say, such as another split and .map(...)."""
        self._spend()
        match self._assigned_to(node):
            case ast.Subscript(value=owner, slice=part):
                changes |= _split(self._value(part))
                return self._dataset(owner, changes)
            case ast.Call() as call if _name(call) == "load_dataset":
                given = {keyword.arg: self._value(keyword.value) for keyword in call.keywords}
                changes |= _split(given.get("split", "train"))
                names = [self._value(argument) for argument in call.args[:2]]
                return given.get("data_files", COMPUTED if COMPUTED in names else ":".join(map(str, names)))
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) as call:
                changes[method] = ast.unparse(call)[len(ast.unparse(call.func)) :]
                return self._dataset(owner, changes)
            case ast.Constant(None):
                return None
        return COMPUTED

    def _spend(self, parts: int = 1) -> None:
        self._room -= parts
        if self._room < 0:
            raise ValueError(f"its arguments have more than {_MOST_PARTS:,} parts")


def _split(name: Any) -> dict[str, str]:
    return {} if name == "train" else {"split": str(name)}


def _name(call: ast.Call) -> str:
    """Return the name of what is called, without its module."""
    match call.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""

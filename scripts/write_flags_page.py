"""Write docs/flags.md, the page of this package's flags, from the code.

    python scripts/write_flags_page.py

It parses settings/, generation/server/arguments.py and types.py in swift_megatron_grpo, and imports only the
description of ranges. tests/unit/docs/test_generated_pages.py compares page and code.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.settings.flag import Above, AtLeast, Range

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "swift_megatron_grpo"
PAGE = REPOSITORY / "docs" / "flags.md"

# The classes of settings/ whose flags a section has.
AREAS = {
    "Start, stop and time limits": ("Check", "TimeLimits", "Trace", "Warnings"),
    "Rewards and evaluation": ("Rewards", "RewardModels", "Evaluation"),
    "Algorithm": ("Algorithm", "LossConfig", "Vespo", "Chord", "Correction", "Kl", "Routing"),
    "Data": ("Data",),
    "Batches and speed": ("MicroBatches", "Kernels", "Offloading"),
    "Reference and teacher": ("Reference", "Teacher", "Rlsd", "Sdar"),
    "vLLM and servers": ("Sampling", "Servers", "ApiKey", "Asynchronous", "Speculation"),
    "LoRA, quantization and weight sync": ("Adapter",),
    "Rollouts on disk": ("Recording",),
    "Checkpoints": ("Checkpoints",),
}
# A value that is neither the default nor one of the choices; other flags get one of their type.
EXAMPLES = {
    "host": "10.0.0.5", "port": "8001", "api_key": "KEY", "health_timeout": "600", "max_prompt_characters": "4194304",
    "vllm_engine_kwargs": """'{"max_num_batched_tokens": 16384}'""",
}  # fmt: skip
# Choices of ms-swift that are refused.
REFUSED = {"truncation_strategy": ("right", "split")}
# Flags of `swift rollout` that have another default here, and no help text of ours.
WITHOUT_HELP = {
    "vllm_use_async_engine": "The asynchronous engine. It is the only one here; false is refused.",
    "vllm_engine_kwargs": "Settings of vLLM as JSON. Those that would change the policy are refused.",
    "host": "Address to listen on. ms-swift listens on every interface by default.",
    "port": "Port to listen on. A port in use is refused; ms-swift takes the next free one.",
}
HEAD = """\
# Flags

The flags of this package, beyond [those of ms-swift](https://swift.readthedocs.io/en/latest/Megatron-SWIFT/Command-line-parameters.html),
which work as they do there, [with some exceptions](../README.md#not-supported). `megatron rlhf --rlhf_type grpo --help`
prints both. An example is a value that is accepted, not a recommendation.

This page is written by `python scripts/write_flags_page.py` from the code.
"""


@dataclass(frozen=True)
class Flag:
    name: str
    group: str  # the class that describes it
    type: str
    choices: tuple[str, ...]
    default: Any
    help: str
    typed: str = ""  # an example
    range: Range | None = None

    @property
    def example(self) -> str:
        """Return a value that differs from the default."""
        if self.typed or self.name in EXAMPLES:
            return self.typed or EXAMPLES[self.name]
        if self.choices:
            return next(choice for choice in self.choices if choice != as_typed(self.default))
        if self.type.startswith("true"):
            return as_typed(not self.default)
        if isinstance(self.default, int | float):
            return as_typed(2 * self.default or 1)
        return {"integer": "2", "number": "60", "text": "TEXT"}.get(self.type, "VALUE")


def all_flags() -> list[Flag]:
    """Return the flags of the trainer: those of the classes in settings/."""
    return [flag for file in sorted((PACKAGE / "settings").glob("*.py")) for flag in flags(file)]


def flags(path: Path) -> list[Flag]:
    """Return the flags that the dataclasses of a file add, in the order of the code."""
    aliases = _aliases()
    module = ast.parse(path.read_text())
    fields = [
        (node.name, field)
        for node in module.body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and field.value
    ]
    if path.parent.name == "settings":
        return [_described(group, field, aliases, module) for group, field in fields if _is_described(field)]
    return [_flag(group, field, aliases) for group, field in fields]


def page() -> str:
    described = all_flags()
    sections = []
    for area, groups in AREAS.items():
        members = [flag for group in groups for flag in described if flag.group == group]
        sections.append(f"## {area}\n\n{_table(members)}")
    server = _table(flags(PACKAGE / "generation" / "server" / "arguments.py"))
    intro = "Beyond ms-swift's, or with another default. [security.md](security.md) says what the limits are for."
    return "\n".join([HEAD, *sections, f"## Of `swift rollout`\n\n{intro}\n\n{server}"])


def as_typed(value: Any) -> str:
    """Return a value as on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _table(members: list[Flag]) -> str:
    head = ["| flag | values | default | example |", "| --- | --- | --- | --- |"]
    rows = [
        f"| `--{flag.name}` | {_values(flag)} | {_default(flag)} | `--{flag.name} {flag.example}` |" for flag in members
    ]
    texts = [f"* `--{flag.name}`: {_as_markdown(flag.help)}" for flag in members]
    return "\n".join([*head, *rows, "", *texts]) + "\n"


def _values(flag: Flag) -> str:
    accepted = [choice for choice in flag.choices if choice not in REFUSED.get(flag.name, ())]
    return ", ".join(accepted) or (f"{flag.type}, {flag.range}" if flag.range else flag.type)


def _default(flag: Flag) -> str:
    return "none" if flag.default is None else f"`{as_typed(flag.default)}`"


def _as_markdown(text: str) -> str:
    """Escape what Markdown would read as markup in the text that --help prints."""
    return "".join("\\" + letter if letter in "<*`" else letter for letter in text)


def _flag(group: str, field: ast.AnnAssign, aliases: dict[str, tuple[str, ...]]) -> Flag:
    assert isinstance(field.target, ast.Name) and field.value is not None
    name, described, choices = field.target.id, _type(field.annotation), _choices(field.annotation, aliases)
    if isinstance(field.value, ast.Call) and field.value.args:
        usual, text = field.value.args
        return Flag(name, group, described, choices, _value(usual), ast.literal_eval(text).replace("%%", "%"))
    if isinstance(field.value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in field.value.keywords}
        default = _value(given["default"]) if "default" in given else None
        metadata = ast.literal_eval(given["metadata"]) if "metadata" in given else {}
        return Flag(name, group, described, choices, default, metadata["help"].replace("%%", "%"))
    return Flag(name, group, described, choices, _value(field.value), WITHOUT_HELP[name])


def _is_described(field: ast.AnnAssign) -> bool:
    return isinstance(field.value, ast.Call) and ast.unparse(field.value.func) == "flag"


def _described(group: str, field: ast.AnnAssign, aliases: dict[str, tuple[str, ...]], module: ast.Module) -> Flag:
    """Read `name: Annotated[type, Range or OneOf] = flag(default, help, ...)`."""
    assert isinstance(field.target, ast.Name) and isinstance(field.value, ast.Call)
    annotation, range_ = field.annotation, None
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, valid = annotation.slice.elts
        range_ = None if ast.unparse(valid).startswith("OneOf(") else _range(valid, module)
    default, text = map(ast.literal_eval, field.value.args)
    example = next((ast.literal_eval(word.value) for word in field.value.keywords if word.arg == "example"), "")
    choices = _choices(field.annotation, aliases)
    name = field.target.id
    return Flag(name, group, _type(annotation), choices, default, text.replace("%%", "%"), example, range_)


def _range(node: ast.expr, module: ast.Module) -> Range:
    """Return the range in an annotation, which may be a name that the module gives to one."""
    if isinstance(node, ast.Name):
        assigned = (one for one in module.body if isinstance(one, ast.Assign))
        node = next(one.value for one in assigned if ast.unparse(one.targets[0]) == ast.unparse(node))
    found: Range = eval(ast.unparse(node), {"Range": Range, "AtLeast": AtLeast, "Above": Above})
    return found


def _value(node: ast.expr) -> Any:
    """Return the value of a default, which may be a power or LOOPBACK."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _value(node.left) ** _value(node.right)
    return "127.0.0.1" if isinstance(node, ast.Name) and node.id == "LOOPBACK" else ast.literal_eval(node)


def _choices(annotation: ast.expr, aliases: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            values = ast.literal_eval(node.slice)
            return values if isinstance(values, tuple) else (values,)
        if isinstance(node, ast.Name) and node.id in aliases:
            return aliases[node.id]
    return ()


def _type(annotation: ast.expr) -> str:
    names = {"bool": "true, false", "int": "integer", "float": "number", "str": "text"}
    parts = ast.unparse(annotation).split(" | ")
    if parts[0].startswith("dict"):
        return "JSON"
    return "several texts" if parts[0].startswith("list") else names.get(parts[0], parts[0])


@functools.cache
def _aliases() -> dict[str, tuple[str, ...]]:
    named = [*(PACKAGE / "settings").glob("*.py"), PACKAGE / "types.py"]
    return dict(alias for file in named for alias in _aliases_of(file))


def _aliases_of(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names of Literals, and of tables of OneOf, with their values."""
    source = path.read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            yield ast.unparse(node.targets[0]), _choices(node.value, {})
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            name = ast.unparse(node.target)
            if f"OneOf({name})" in source:
                yield name, tuple(ast.literal_eval(key) for key in node.value.keys if key is not None)


if __name__ == "__main__":
    PAGE.write_text(page())

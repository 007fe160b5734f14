"""docs/metrics.md lists exactly the metrics that the code logs, found in its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "swift_megatron_grpo"
FOLDERS = ("output/console", "grading", "loop", "training")
FILES = sorted(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
PAGE = (REPOSITORY / "docs" / "metrics.md").read_text()
PHASES = "time/<phase>"  # of the timer; its names are the arguments of `timer(...)`
# ms-swift and megatron-core add these, so no literal of ours names them.
OF_OTHERS = {
    "learning_rate", "iteration", "elapsed_time", "remaining_time", "train_speed(s/it)", "z_loss",
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


def text_of(node: ast.expr | None) -> str | None:
    """Return a literal, with <name> for what an f-string fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            f"<{ast.unparse(part.value)}>" if isinstance(part, ast.FormattedValue) else text_of(part)
            for part in node.values
        )
        return "".join(part or "" for part in parts)
    return None


def returns_metrics(function: Function) -> bool:
    returned = ast.unparse(function.returns) if function.returns else ""
    return "Metrics" in returned or returned == "dict[str, float]"


def is_metrics(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[-1] == "metrics"


def spread_in(node: ast.Dict) -> list[ast.expr]:
    return [value for key, value in zip(node.keys, node.values, strict=True) if key is None]


def names_in(function: Function) -> Iterator[str]:
    """Yield the names of metrics: keys of dicts that a function of metrics builds, and items set on `metrics`."""
    prefixes = [
        text.removesuffix("<name>")
        for node in ast.walk(function)
        if isinstance(node, ast.DictComp) and (text := text_of(node.key)) and text.endswith("/<name>")
    ]
    prefix = prefixes[0] if prefixes else ""
    for node in ast.walk(function):
        if isinstance(node, ast.Dict) and (returns_metrics(function) or any(map(is_metrics, spread_in(node)))):
            yield from (prefix + text for key in node.keys if (text := text_of(key)))
        elif isinstance(node, ast.DictComp) and not prefix and returns_metrics(function):
            yield text_of(node.key) or ""
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_metrics(node.value):
            yield text_of(node.slice) or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("metrics.update"):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def phases_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "timer":
            given = node.args[0]
            for phase in (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,):
                yield f"time/{text_of(phase)}"


def logged() -> set[str]:
    names: set[str] = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        functions = (node for node in ast.walk(tree) if isinstance(node, Function))
        names |= {name for function in functions for name in names_in(function) if name}
        names |= set(phases_in(tree))
    return names - {PHASES}


def listed() -> set[str]:
    return {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def test_the_code_is_understood() -> None:
    assert {"reward", "rewards/<name>/mean", "time/train", "rollout_correction/kl", "kl_beta", "loss"} <= logged()


def test_the_page_lists_every_metric_of_the_code() -> None:
    assert logged() - listed() == set()


def test_the_code_logs_every_metric_of_the_page() -> None:
    balancing = {name for name in listed() if name.endswith("load_balancing_loss")}
    source = (PACKAGE / "training" / "upstream_fixes" / "routers.py").read_text()
    assert all(f'"{name}"' in source for name in balancing)
    assert listed() - logged() - balancing == OF_OTHERS

"""Write docs/python_api.md: signatures, fields and docstrings of the classes and functions that programs may import.

    python -m scripts.write_api_page

The source is read as text, so nothing is imported. tests/unit/docs/test_generated_pages.py compares the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swift_megatron_grpo"
PAGE = ROOT / "docs" / "python_api.md"
HEAD = """\
# Python API

<!-- Written by `python -m scripts.write_api_page` from docstrings. Do not edit: a test compares them. -->

These are the classes and functions of `swift_megatron_grpo` that a program may import. Everything else may change
between versions. [engine.md](engine.md) has a complete program. Reward functions, environments and schedulers are
ms-swift's classes: [datasets_and_rewards.md](datasets_and_rewards.md).

Shapes in comments: p prompt tokens, c completion tokens, t = p + c, m trained tokens of a micro batch, s sequences.
"""
SECTIONS = {
    "Engine": {
        "training/engine.py": ["MegatronEngine", "NonFiniteStep", "NonFiniteWeights", "OptimizerStepFailed"],
        "training/planner.py": ["EngineSettings"],
    },
    "Values of a step": {"types.py": ["Sample", "TokenValues", "Prompt", "Rollout", "Graded"]},
    "Losses": {
        "training/loss/total.py": ["make_loss", "Loss", "reads_entropy"],
        "training/loss/terms.py": ["TokenOutput", "Terms"],
        "training/loss/plugins.py": ["register_loss", "register_metric"],
        "training/loss/averages.py": ["token_mean", "sequence_mean", "over_tokens", "over_sequences", "over_budget"],
        "training/loss/kl.py": ["k1", "k2", "k3"],
    },
    "Rewards and advantages": {
        "grading/rewards.py": ["RewardFunctions", "call_reward_functions", "RewardError", "gym_reward"],
        "grading/scores.py": ["Scores"],
        "grading/columns.py": ["Rewards"],
        "grading/graded.py": ["GradedRollouts"],
        "grading/results.py": ["total_rewards", "add_advantages", "BadReward"],
        "grading/advantages.py": ["group_advantages", "gdpo_advantages", "register_estimator"],
    },
    "Agents": {"generation/conversations/agents.py": ["register_agent"]},
}  # by heading and file; names in the order of the page

Definition = ast.ClassDef | ast.FunctionDef


def page() -> str:
    texts = [HEAD, *(text for heading, files in SECTIONS.items() for text in _section(heading, files))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(texts)).rstrip("\n") + "\n"


def _section(heading: str, files: dict[str, list[str]]) -> Iterator[str]:
    yield f"## {heading}\n"
    for file, names in files.items():
        source = (PACKAGE / file).read_text()
        defined = {node.name: node for node in ast.parse(source).body if isinstance(node, Definition)}
        for name in names:
            yield _entry(defined[name], f"swift_megatron_grpo.{file.removesuffix('.py').replace('/', '.')}", source)


def _entry(node: Definition, module: str, source: str) -> str:
    lines = [f"### `{node.name}`\n", f"`from {module} import {node.name}`\n"]
    if isinstance(node, ast.FunctionDef):
        return "\n".join([*lines, _code(_signature(node)), *_prose(node)])
    fields = [line for child in node.body if isinstance(child, ast.AnnAssign) for line in _field(child, source)]
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef) and _is_public(child)]
    made = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    body = [*fields, *(_indented(_signature(method)) for method in [*made, *methods])] or ["    ..."]
    lines += [_code("\n".join([f"class {node.name}{bases}:", *body])), *_prose(node)]
    for method in methods:
        if described := _docstring(method):
            lines.append(f"* **`{method.name}`**: {' '.join(described.split())}")
    return "\n".join(lines) + "\n"


def _is_public(method: ast.FunctionDef) -> bool:
    return not method.name.startswith("_")


def _field(node: ast.AnnAssign, source: str) -> Iterator[str]:
    """Yield the lines of a field as they stand in the source, with their comment."""
    yield from source.splitlines()[node.lineno - 1 : node.end_lineno]


def _signature(node: ast.FunctionDef) -> str:
    decorated = "".join(
        f"@{name}\n" for name in map(ast.unparse, node.decorator_list) if name in ("property", "classmethod")
    )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"def {node.name}({ast.unparse(node.args)}){returns}"
    if len(whole) <= 100:
        return decorated + whole
    typed = re.split(r", (?=\*?\*?\w+: |\*, |\*$)", ast.unparse(node.args))
    return decorated + f"def {node.name}(\n" + "".join(f"    {argument},\n" for argument in typed) + f"){returns}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _docstring(node: Definition) -> str:
    return ast.get_docstring(node) or ""


def _prose(node: Definition) -> list[str]:
    """Return the docstring as Markdown; a paragraph with aligned or indented lines is code."""
    out: list[str] = []
    for paragraph in _docstring(node).split("\n\n"):
        if "  " in paragraph:
            out.append(f"```\n{paragraph}\n```\n")
        elif paragraph:
            out.append(" ".join(paragraph.splitlines()).replace("*", r"\*").replace("<", r"\<") + "\n")
    return out


if __name__ == "__main__":
    PAGE.write_text(page())

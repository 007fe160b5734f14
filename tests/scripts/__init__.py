"""Published scripts as data: the flags of each, where they are from, and how they are turned into a script again.

YAML files of ms-swift's Ray pipeline are converted as `swift-megatron-grpo convert` does.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.cli.convert.ray import RAY
from swift_megatron_grpo.cli.convert.tables import convert

# Scripts that are not run in tests/e2e/test_scripts.py, with the type of the model that is refused.
NOT_RUN = {
    "deepseek_v41_colocate_full": "deepseek_v41",
    "deepseek_v41_colocate_lora": "deepseek_v41",
    "deepseek_v41_megatron_grpo": "deepseek_v41",
    "qwen4_exp_megatron_grpo": "qwen4_exp",
}
_GITHUB = "https://github.com/modelscope/ms-swift/blob"
_PLACES = {
    "example": "`examples` of the main branch",
    "ray": "colocated YAML files of the main branch for its Ray pipeline",
    "page or test": "a page and a test of the main branch",
    "branch": "`examples` of branches and pull requests",
}


@dataclass(frozen=True)
class Published:
    name: str
    source: str  # path in modelscope/ms-swift
    commit: str
    where: str  # key of _PLACES
    ranks: int
    rollout: str | None  # flags of `swift rollout`
    flags: str  # of `megatron rlhf`, quoted for a shell

    @property
    def text(self) -> str:
        """A script with these flags."""
        rollout = "" if self.rollout is None else f"CUDA_VISIBLE_DEVICES=0 swift rollout {self.rollout} &\n"
        return f"#!/bin/bash\n{rollout}NPROC_PER_NODE={self.ranks} \\\nmegatron rlhf {self.flags}\n"

    @property
    def has_images(self) -> bool:
        return "clevr_cogen_a_train" in self.flags  # the one dataset with images among them

    @property
    def model(self) -> str:
        return self.flags.partition("--model ")[2].split()[0].partition("/")[2]


def published_scripts() -> dict[str, Published]:
    data = json.loads(Path(__file__).with_name("ms_swift.json").read_text())
    return {script["name"]: _published(script) for script in data["scripts"]}


def _published(script: Mapping[str, Any]) -> Published:
    settings = script.get("settings")
    if settings is None:
        return Published(**script)
    conversion = convert(settings, RAY)
    assert not conversion.unknown and not conversion.by_hand
    words = (f"--{name} {shlex.join(values)}" for name, values in conversion.flags.items())
    ranks = int(conversion.environment["NPROC_PER_NODE"])
    kept = {name: script[name] for name in ("name", "source", "commit", "where")}
    return Published(**kept, ranks=ranks, rollout=None, flags=" ".join(["--rlhf_type grpo", *words]))


def counts() -> list[str]:
    """Return the lines of the table of docs/scripts.md that counts scripts."""
    scripts = list(published_scripts().values())
    tried = [script for script in scripts if script.name not in _of_refused_types()]
    lines = [_count(title, [s for s in scripts if s.where == where]) for where, title in _PLACES.items()]
    return [
        "| scripts | accepted, and two steps trained |",
        "| --- | --- |",
        *lines,
        _count("all", scripts),
        _count("all but those of `deepseek_v41` and `qwen4_exp`", tried),
        _count("of these, those on images", [script for script in tried if script.has_images]),
    ]


def table() -> Iterator[str]:
    """Yield the lines of the table of docs/scripts.md that lists the scripts."""
    yield "| script | model | rows | ranks | result |"
    yield "| --- | --- | --- | --- | --- |"
    for script in published_scripts().values():
        rows = "images" if script.has_images else "text"
        refused = NOT_RUN.get(script.name)
        result = "two steps" if refused is None else f"refused: `{refused}`"
        link = f"[{script.name}]({_GITHUB}/{script.commit}/{script.source})"
        yield f"| {link} | {script.model} | {rows} | {script.ranks} | {result} |"


def _of_refused_types() -> set[str]:
    return {name for name, refused in NOT_RUN.items() if not refused.startswith("--")}


def _count(title: str, scripts: Sequence[Published]) -> str:
    return f"| {title} | {sum(script.name not in NOT_RUN for script in scripts)} of {len(scripts)} |"

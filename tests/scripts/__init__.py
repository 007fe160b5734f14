"""Published scripts as data: the flags of each, where they are from, and how they are turned into a script again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Published:
    name: str
    source: str  # path in modelscope/ms-swift
    commit: str
    ranks: int
    rollout: str | None  # flags of `swift rollout`
    flags: str  # of `megatron rlhf`, quoted for a shell

    @property
    def text(self) -> str:
        """A script with these flags."""
        rollout = "" if self.rollout is None else f"CUDA_VISIBLE_DEVICES=0 swift rollout {self.rollout} &\n"
        return f"#!/bin/bash\n{rollout}NPROC_PER_NODE={self.ranks} \\\nmegatron rlhf {self.flags}\n"


def published_scripts() -> dict[str, Published]:
    data = json.loads(Path(__file__).with_name("ms_swift.json").read_text())
    return {script["name"]: Published(**script) for script in data["scripts"]}

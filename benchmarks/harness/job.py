"""Settings that the benchmark passes to the processes it starts: a file whose path is in the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "SWIFT_MEGATRON_GRPO_BENCHMARK"


@dataclass(frozen=True, slots=True)
class Job:
    arm: str  # the trainer: ours, stock
    canned: bool  # completions are generated from the seed, and vLLM does not start
    folder: str  # for the ranks' results
    prompt_tokens: list[int]  # [row of the dataset]
    completion_tokens: list[list[int]]  # [row][completion]
    vocabulary: int
    seed: int
    memory_cap_gb: float | None  # per GPU
    media_tokens: list[int]  # ids of the image placeholder and of the other tokens around images, if rows have some
    served: bool  # a server generates; otherwise vLLM runs in the training processes, unless completions are canned
    profiled_step: int | None  # of which the kernels are written to the folder; its time is not that of a step
    random_weights: bool  # the checkpoint has none: both trainers draw them on the device
    waits: bool  # for a file `go` in the folder, before the process uses the GPU

    def write(self) -> Path:
        path = Path(self.folder, "job.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls) -> Job:
        return cls(**json.loads(Path(os.environ[VARIABLE]).read_text()))

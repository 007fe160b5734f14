"""Measure TRL's GRPOTrainer on a job of bench.py: `python -m benchmarks.peers.trl_arm FLAG...`, started by bench.py.

The flags are those of TRL's GRPOConfig and ModelConfig, and those of Arguments in trl_trainer.py.
"""

from __future__ import annotations

import torch

from benchmarks.harness.job import Job
from swift_megatron_grpo.platforms import cpu


def main() -> None:
    job = Job.read()
    if not torch.cuda.is_available():
        cpu.activate()  # vLLM on a CPU, and a torch.cuda that the clock can read
    from benchmarks.peers import trl_trainer  # reads the environment that the line above sets

    trl_trainer.run(job)


if __name__ == "__main__":
    main()

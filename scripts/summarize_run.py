"""Say in one line whether a run has learned, and fail if it has not.

    python scripts/summarize_run.py DIR [--min-gain 2]

DIR is the --output_dir of `megatron rlhf --rlhf_type grpo`: its logging.jsonl has the reward of every logged step, its
args.json the number of ranks. Exit code 0 only if the mean reward of the last five steps is at least `--min-gain` times
that of the first five, over at least ten steps, all of them finite.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

MEAN_OVER = 5
MIN_STEPS = 10


def read_steps(log: Path) -> list[dict[str, Any]]:
    """The logged training steps of the last run: ms-swift appends, and a new run in the folder starts at step 1."""
    steps: list[dict[str, Any]] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "reward" not in row:
            continue  # evaluations, the summary at the end
        if steps and _number(row) <= _number(steps[-1]):
            steps = []
        steps.append(row)
    return steps


def _number(row: dict[str, Any]) -> int:
    return int(str(row["iteration"]).split("/")[0])  # "7/30"


def gain(rewards: list[float]) -> tuple[float, float]:
    """Mean reward at the start and at the end; ValueError says why there is none."""
    if len(rewards) < MIN_STEPS:
        raise ValueError(f"{len(rewards)} steps are logged, and it takes {MIN_STEPS} to see a trend")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"the reward of step {[math.isfinite(r) for r in rewards].index(False) + 1} is not finite")
    return statistics.fmean(rewards[:MEAN_OVER]), statistics.fmean(rewards[-MEAN_OVER:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--min-gain", type=float, default=2.0)
    args = parser.parse_args()

    try:
        rewards = [float(step["reward"]) for step in read_steps(args.folder / "logging.jsonl")]
        ranks = json.loads((args.folder / "args.json").read_text(encoding="utf-8"))["global_world_size"]
        first, last = gain(rewards)
    except (OSError, ValueError, KeyError) as error:
        print(f"quickstart: no result in {args.folder}: {error}", file=sys.stderr)
        return 1
    enough = first > 0 and last >= args.min_gain * first
    if not enough:
        print(f"quickstart: the reward did not reach {args.min_gain:g} times its start", file=sys.stderr)
    print(
        f"quickstart: reward {first:.3f} -> {last:.3f} over {len(rewards)} steps on {ranks} ranks, run in {args.folder}"
    )
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())

"""Print the reward before and after a run, and fail if it has not increased enough.

    python scripts/summarize_run.py DIR [--min-gain 2]
    python scripts/summarize_run.py DIR --held-out 0.1

DIR is the --output_dir of `megatron rlhf --rlhf_type grpo`: logging.jsonl contains the reward of every logged step,
args.json the number of ranks. The exit code is 0 only if at least ten steps are logged, all rewards are finite, and the
mean reward of the last five steps is at least `--min-gain` times that of the first five.

With `--held-out` it is 0 only if eval_pass@1, the accuracy on prompts that were not trained, is higher by that much
after the last step than before the first one. Completions of both steps, from --log_completions, are printed as well.
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
    """Return the training steps of the last run in a log; ms-swift appends, and every run starts at step 1."""
    steps: list[dict[str, Any]] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "reward" not in row:
            continue  # an evaluation or the final summary
        if steps and _step_number(row) <= _step_number(steps[-1]):
            steps = []
        steps.append(row)
    return steps


def _step_number(row: dict[str, Any]) -> int:
    return int(str(row["iteration"]).split("/")[0])  # "7/30"


def gain(rewards: list[float]) -> tuple[float, float]:
    """Return the mean reward at the start and at the end; raise ValueError if it cannot be computed."""
    if len(rewards) < MIN_STEPS:
        raise ValueError(f"{len(rewards)} steps are logged, but a comparison needs at least {MIN_STEPS}")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"the reward of step {[math.isfinite(r) for r in rewards].index(False) + 1} is not finite")
    return statistics.fmean(rewards[:MEAN_OVER]), statistics.fmean(rewards[-MEAN_OVER:])


def held_out(log: Path) -> tuple[float, float]:
    """Return the accuracy on held-out prompts before the first step and after the last one."""
    rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    accuracy = {_step_number(row): float(row["eval_pass@1"]) for row in rows if "eval_pass@1" in row}
    if len(accuracy) < 2 or 0 not in accuracy:
        raise ValueError(f"accuracy is logged for steps {sorted(accuracy)}, but a comparison needs 0 and a later one")
    return accuracy[0], accuracy[max(accuracy)]


def print_samples(completions: Path) -> None:
    """Print a completion of each prompt of the first and of the last step."""
    rows = [json.loads(line) for line in completions.read_text(encoding="utf-8").splitlines()]
    for name, rollout in (("first", rows[0]["rollout"]), ("last", rows[-1]["rollout"])):
        print(f"quickstart: completions of the {name} step, with their rewards")
        for row in {row["prompt"]: row for row in rows if row["rollout"] == rollout}.values():
            question = row["prompt"].split("<|im_start|>user")[-1].split("<|im_end|>")[0].strip()
            print(f"  {row['total_reward']:.2f}  {question!r} -> {row['completion'].removesuffix('<|im_end|>')!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="output folder of the run")
    parser.add_argument("--min-gain", type=float, default=2.0, help="required ratio of the last to the first rewards")
    parser.add_argument("--held-out", type=float, help="required increase of the accuracy on held-out prompts instead")
    args = parser.parse_args()

    log = args.folder / "logging.jsonl"
    try:
        rewards = [float(step["reward"]) for step in read_steps(log)]
        ranks = json.loads((args.folder / "args.json").read_text(encoding="utf-8"))["global_world_size"]
        first, last = gain(rewards) if args.held_out is None else held_out(log)
        if args.held_out is not None:
            print_samples(args.folder / "completions.jsonl")
    except (OSError, ValueError, KeyError) as error:
        print(f"quickstart: no result in {args.folder}: {error}", file=sys.stderr)
        return 1
    if args.held_out is None:
        what, required = "reward", f"reach {args.min_gain:g} times its initial value"
        enough = first > 0 and last >= args.min_gain * first
    else:
        what, required = "held-out accuracy", f"rise by {args.held_out:g}"
        enough = last >= first + args.held_out
    if not enough:
        print(f"quickstart: the {what} did not {required}", file=sys.stderr)
    print(
        f"quickstart: {what} {first:.3f} -> {last:.3f} over {len(rewards)} steps on {ranks} ranks, run in {args.folder}"
    )
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())

"""Train the quickstart's task with every loss and every advantage estimator, and report the reward before and after.

    python -m benchmarks.train_every_algorithm [--only NAME ...] [--out FILE] [--work DIR]

Each run is that of the quickstart: a tiny random model, 30 steps, two CPU ranks, about a minute. The results are merged
into FILE, which keeps those of other names. The default FILE is docs/algorithms_trained.json; docs/algorithms.md shows
its contents between two markers and is updated as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.paths import REPOSITORY, absolute

RESULTS = REPOSITORY / "docs" / "algorithms_trained.json"
PAGE = REPOSITORY / "docs" / "algorithms.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# With several steps per rollout, ratios differ from 1 and clipping has an effect.
OFF_POLICY = ["--steps_per_generation", "2"]
ALGORITHMS: dict[str, list[str]] = {
    **{name: ["--loss_type", name, *OFF_POLICY] for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "fipo")},
    "cispo": ["--loss_type", "cispo", "--epsilon_high", "5", *OFF_POLICY],
    "real": ["--loss_type", "real", "--micro_batch_size", "8", *OFF_POLICY],
    "luspo": ["--loss_type", "luspo", "--importance_sampling_level", "sequence", *OFF_POLICY],
    "vespo": ["--loss_type", "vespo", *OFF_POLICY],
    "dppo_tv": ["--loss_type", "dppo_tv", *OFF_POLICY],
    "dppo_kl": ["--loss_type", "dppo_kl", "--epsilon", "0.05", *OFF_POLICY],
    "gspo": ["--importance_sampling_level", "sequence", *OFF_POLICY],
    "gspo_token": ["--importance_sampling_level", "sequence_token", *OFF_POLICY],
    "rloo": ["--advantage_estimator", "rloo", "--beta", "0.001"],
    "reinforce_plus_plus": ["--advantage_estimator", "reinforce_plus_plus", "--beta", "0.001"],
    "reinforce_plus_plus_plain": [
        *["--advantage_estimator", "reinforce_plus_plus_plain", "--num_generations", "1", "--beta", "0.001"]
    ],
    "optimal_token_baseline": ["--advantage_estimator", "optimal_token_baseline", *OFF_POLICY],
    "gdpo": ["--scale_rewards", "gdpo", "--reward_funcs", "letters", "repetition"],
    "selection": [
        *["--dynamic_sample", "true", "--overlong_filter", "false", "--top_entropy_quantile", "0.5"],
        *["--rollout_importance_sampling_mode", "token_truncate", "--off_policy_sequence_mask_delta", "0.5"],
        *["--kl_target", "0.05", "--beta", "0.001", "--entropy_coef", "0.001"],
    ],
}


MEAN_OVER = 5


@dataclass(frozen=True)
class Result:
    flags: str
    before: float  # mean reward of the first five rollouts
    after: float  # mean reward of the last five rollouts
    rollouts: int


def train(name: str, work: Path) -> Result:
    """Train with one algorithm; raise, with the end of the output, if the run fails."""
    model, dataset, output = work / "model", work / "data.jsonl", work / name
    python = [sys.executable]
    shutil.rmtree(output, ignore_errors=True)  # ms-swift appends to an existing log
    if not model.is_dir():
        subprocess.run([*python, "scripts/make_tiny_model.py", "--out", str(model)], check=True, cwd=REPOSITORY)
        command = [*python, "scripts/make_dataset.py", "--out", str(dataset), "--rows", "64", "--seed", "0"]
        subprocess.run(command, check=True, cwd=REPOSITORY)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(model),
        "DATASET": str(dataset),
        "OUTPUT": str(output),
    }
    command = [str(REPOSITORY / "templates" / "cpu_quickstart.sh"), *ALGORITHMS[name]]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output.with_suffix(".txt").write_text(done.stdout)
    if done.returncode != 0:
        end = done.stdout[-4000:]
        raise RuntimeError(f"{name} ended with exit code {done.returncode}; the end of its output:\n{end}")
    steps = [json.loads(line) for line in (output / "logging.jsonl").read_text().splitlines()]
    rewards = [step["rewards/letters/mean"] for step in steps if "rewards/letters/mean" in step]
    before, after = statistics.fmean(rewards[:MEAN_OVER]), statistics.fmean(rewards[-MEAN_OVER:])
    return Result(" ".join(ALGORITHMS[name]), round(before, 3), round(after, 3), len(rewards))


def table(results: dict[str, dict[str, object]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| | flags in addition to the quickstart | reward before | reward after |", "| --- | --- | --- | --- |"]
    for name in ALGORITHMS:
        if name in results:
            row = results[name]
            lines.append(f"| {name} | `{row['flags']}` | {row['before']:.3f} | {row['after']:.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME",
                        help=f"algorithms to train (default: all): {', '.join(ALGORITHMS)}")  # fmt: skip
    parser.add_argument("--out", type=absolute, default=RESULTS, metavar="FILE", help="file for the results")
    parser.add_argument("--work", type=absolute, default=REPOSITORY / "runs" / "algorithms", metavar="DIR",
                        help="folder for the model, the dataset and the outputs")  # fmt: skip
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.only:
        result = train(name, args.work)
        results[name] = asdict(result)
        args.out.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{name}: reward {result.before:.3f} -> {result.after:.3f} over {result.rollouts} rollouts", flush=True)
    if args.out == RESULTS:
        page = PAGE.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}\n{table(results)}\n{END}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train with verl: `python -m benchmarks.harness.learning.verl_arm --rows FILE --output_dir FOLDER OVERRIDE...`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.learning.prompts import read_rows
from benchmarks.peers.verl_settings import ENVIRONMENT


def write_parquet(rows: Path, file: Path) -> None:
    """Write the dataset as verl reads it."""
    from datasets import Dataset

    columns = [
        {"data_source": "sums", "prompt": row["messages"], "reward_model": {"ground_truth": row["solution"]}}
        for row in read_rows(rows)
    ]
    Dataset.from_list(columns).to_parquet(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_intermixed_args()
    write_parquet(args.rows, args.output_dir / "rows.parquet")
    environment = {**os.environ, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(args.output_dir / "steps.jsonl")}
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *args.overrides], check=True, env=environment)


if __name__ == "__main__":
    main()

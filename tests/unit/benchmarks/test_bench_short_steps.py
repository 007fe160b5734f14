"""The medians that benchmarks.bench_short_steps prints, from the log of a run."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bench_short_steps import WARM_UP, phases


def test_phases_are_medians_after_the_warm_up_and_other_is_the_rest(tmp_path: Path) -> None:
    seconds = [9.0] * WARM_UP + [0.5, 0.6, 0.7]
    rows = [
        {"train_speed(s/it)": sum(seconds[: i + 1]) / (i + 1), "time/train": second / 2, "reward": i}
        for i, second in enumerate(seconds)
    ]
    rows[-1]["time/sync_check"] = 0.1
    log = tmp_path / "logging.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"train_runtime": 1.0}]))
    result = phases(log)
    assert result == {"step": 600.0, "train": 300.0, "sync_check": 0.0, "other": 250.0, "rewards": [0, 1, 2, 3, 4]}

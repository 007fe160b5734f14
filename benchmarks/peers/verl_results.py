"""Steps of a result file from the metrics that verl logs. Pure.

verl times the whole step itself, from the requests to vLLM to the end of the weight sync, so the phases are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PHASE_OF_TIMER = {
    "gen": "generation",
    "reward": "grading",
    "adv": "grading",
    "old_log_prob": "logprobs",
    "update_actor": "forward_backward",  # with the optimizer, which verl does not time
    "update_weights": "weight_sync",
}


def result_of(rows: list[Mapping[str, float]], completions: int) -> dict[str, Any]:
    """Return the contents of a rank's result file; `rows` are the metrics of each step."""
    first = rows[0]
    prompt, completion = (round(first[f"{name}_length/mean"] * completions) for name in ("prompt", "response"))
    return {
        "steps": [_step_of(row) for row in rows],
        "tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _step_of(row: Mapping[str, float]) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for timer, phase in PHASE_OF_TIMER.items():
        phases[phase] = phases.get(phase, 0.0) + row.get(f"timing_s/{timer}", 0.0)
    seconds = row["timing_s/step"]
    phases["other"] = max(0.0, seconds - sum(phases.values()))
    return {
        "seconds": seconds,
        "phases": phases,
        "peak_bytes": {"forward_backward": row["actor/perf/max_memory_allocated_gb"] * 2**30},  # of all steps so far
        "reserved_bytes": row["actor/perf/max_memory_reserved_gb"] * 2**30,
        "vllm_bytes": None,  # not logged, nor are the next ones
        "outside_bytes": None,
        "allocator_retries": None,
        "busy_cores": None,
        "loss": row["actor/loss"],
        "grad_norm": row["actor/grad_norm"],
    }

"""`--batch_invariant true` of a server: completions and their log-probs do not depend on how many it generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_server import make_server, train
from tests.support.runs import read_json_lines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
STEPS = 3
FLAGS = ("--seed_completions", "true", "--lr", "1e-12", "--rollout_logprobs_interval", "1")


def test_completions_are_those_of_other_batches(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Servers run up to 3 or up to 32 requests at a time. Without the flag something is not equal."""
    found, seconds = {}, {}
    for invariant in ("true", "false"):
        for running in (3, 32):
            folder = tmp_path / f"{invariant}-{running}"
            folder.mkdir()
            key = (invariant, running)
            found[key], seconds[key] = generated(folder, running, "--batch_invariant", invariant)
    assert found["true", 3] == found["true", 32]
    assert found["false", 3] != found["false", 32]
    for running in (3, 32):
        price = seconds["true", running] / seconds["false", running]
        record_property(f"seconds with the flag over those without, {running} running", round(price, 2))


def generated(folder: Path, running: int, *flags: str) -> tuple[list[tuple[Any, Any]], float]:
    """Return tokens and log-probs of the completions, and the seconds of the last rollout."""
    dump = folder / "dump"
    graphs = ("--vllm_enforce_eager", "false", "--vllm_max_num_seqs", str(running))
    server = make_server(folder, "1", *graphs, *flags)
    try:
        run = train(server, folder, "0", STEPS, *FLAGS, *flags, "--rollout_dump", str(dump))
    finally:
        server.stop()
    rows = [row for number in range(STEPS) for row in read_json_lines(dump / f"rollout-{number:06}.jsonl")]
    return [(row["completion_ids"], row["logprobs"]) for row in rows], run.log[-1]["time/generation"]

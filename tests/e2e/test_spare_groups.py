"""With --spare_groups a run generates other groups earlier, and trains the same ones: real vLLM and real trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.runs import PLUGINS, REWARDS, Finished, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--global_batch_size", "16",
         "--train_iters", "3", "--save_steps", "100", "--dynamic_sample", "true", "--max_resample_times", "2",
         "--reward_funcs", "every_second", "--external_plugins", str(REWARDS),
         str(PLUGINS / "uniform_groups.py")]  # fmt: skip


def train(dense: Path, dataset: Path, folder: Path, spare: str, flags: list[str], url: str | None = None) -> Finished:
    more = [] if url is None else ["--vllm_mode", "server", "--vllm_server_base_url", url]
    dump = ["--rollout_dump", str(folder.with_suffix(".rollouts")), "--spare_groups", spare]
    run = megatron_rlhf(dense, dataset, folder, 2, [*FLAGS, *more, *dump, *flags], {API_KEY_VARIABLE: KEY})
    assert run.code == 0, run.output[-4000:]
    return run


def trained(run: Finished) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "reward", "dynamic_sample/rounds", "dynamic_sample/generated_groups")
    return [{name: step[name] for name in names} for step in run.log]


def dumped(run: Finished) -> dict[str, list[tuple[str, list[int], list[float]]]]:
    """Return prompt, tokens and rewards of every completion, by file; log-probs are rounded by the batch's size."""
    files = sorted(run.folder.with_suffix(".rollouts").glob("rollout-*.jsonl"))
    return {
        path.name: [(row["prompt_id"], row["completion_ids"], row["rewards"]) for row in read_json_lines(path)]
        for path in files
    }


def counted(run: Finished, name: str) -> list[float]:
    return [step[f"dynamic_sample/{name}"] for step in run.log]


def test_the_batches_are_those_of_a_run_without_spare_groups(folder: Path, dense: Path, dataset: Path) -> None:
    alone = train(dense, dataset, folder / "alone", "0", [])
    fixed, auto = (train(dense, dataset, folder / f"spare {spare}", spare, []) for spare in ("5", "auto"))
    assert trained(fixed) == trained(alone) == trained(auto) and dumped(fixed) == dumped(alone) == dumped(auto)
    assert any("draw-1" in name for name in dumped(alone))
    assert counted(alone, "spare_groups") == [0, 0, 0] and counted(fixed, "spare_groups") == [5, 5, 5]
    groups = counted(alone, "generated_groups")
    assert counted(fixed, "dropped_groups") == [max(0, 9 - used) for used in groups]
    first, *later = counted(auto, "spare_groups")
    assert first == 0 and all(0 < spare <= 8 for spare in later)


@pytest.mark.nightly
def test_servers_generate_the_same_batches(folder: Path, dense: Path, dataset: Path) -> None:
    server = RolloutServer(dense, folder / "server.txt").start().wait()
    try:
        alone, together, ahead = (
            train(dense, dataset, folder / name, spare, flags, server.url)
            for name, spare, flags in (
                ("server alone", "0", []),
                ("server spare", "5", []),
                ("server ahead", "5", ["--async_generate", "true", "--max_staleness", "0"]),
            )
        )
    finally:
        server.stop()
    assert trained(together) == trained(alone) == trained(ahead)
    assert dumped(together) == dumped(alone) == dumped(ahead) and counted(together, "spare_groups") == [5, 5, 5]

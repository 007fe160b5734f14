"""A conversation whose tool is slow holds no other one back: real vLLM in real training processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import PLUGINS, REWARDS, Finished, megatron_rlhf

pytestmark = pytest.mark.e2e
FLAGS = ["--multi_turn_scheduler", "gym_scheduler", "--max_turns", "4", "--train_iters", "1", "--save_steps", "100",
         "--sync_check", "off", "--max_completion_length", "8",
         "--external_plugins", str(REWARDS), str(PLUGINS / "waiting_tools.py")]  # fmt: skip


def train(
    inputs: tuple[Path, Path], folder: Path, env: str, quick: int, flags: list[str], **more: str
) -> tuple[Finished, list[list[str]]]:
    """Return the run, and the events of each engine."""
    events = folder.with_suffix(".events")
    environment = {"EVENTS": str(events), "QUICK": str(quick), **more}
    run = megatron_rlhf(*inputs, folder, 2, [*FLAGS, "--gym_env", env, *flags], environment, timeout=200)
    return run, [path.read_text().splitlines() for path in sorted(folder.parent.glob(f"{events.name}.*"))]


@pytest.mark.parametrize(("env", "ranks"), [pytest.param("waiting", 1, marks=pytest.mark.nightly), ("blocking", 2)])
def test_others_run_to_their_ends_while_tools_wait(
    folder: Path, dense: Path, dataset: Path, env: str, ranks: int
) -> None:
    """Eight conversations run on an engine of each rank, or on one of both ranks."""
    quick = 2 * ranks
    flags = ["--vllm_tensor_parallel_size", str(ranks), "--phase_timeout", "60"]
    run, engines = train((dense, dataset), folder / env, env, quick, flags)
    assert run.code == 0, run.output[-4000:]
    assert len(engines) == 2 // ranks
    for events in engines:
        kinds = [event.split()[0] for event in events]
        assert [kinds.count(kind) for kind in ("waits", "answers", "turn", "closes")] == [
            quick,
            quick,
            3 * quick,
            2 * quick,
        ]
        first_answer = kinds.index("answers")
        assert kinds[:first_answer].count("turn") == 3 * quick and kinds[:first_answer].count("closes") == quick
    assert run.log[0]["num_turns"] == 3


@pytest.mark.nightly
def test_a_tool_that_hangs_ends_the_run_after_the_phases_time(folder: Path, dense: Path, dataset: Path) -> None:
    run, [events, _] = train((dense, dataset), folder / "hanging", "hanging", 2, ["--phase_timeout", "20"])
    assert run.code != 0 and "phase generation has not finished after 20 s (--phase_timeout 20)" in run.output
    assert sum(event.startswith("turn 3") for event in events) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stops_while_its_tools_hang(folder: Path, dense: Path, dataset: Path, ranks: int) -> None:
    flags = ["--vllm_tensor_parallel_size", str(ranks), "--stop_grace", "10"]
    run, engines = train((dense, dataset), folder / f"stopped {ranks}", "hanging", 2 * ranks, flags, SIGNAL="1")
    assert "swift_megatron_grpo: stopped by SIGTERM after step 0 of 1" in run.output, run.output[-4000:]
    for events in engines:
        assert sum(event.startswith("closes") for event in events) == 4 * ranks

"""benchmarks/two_stacks.py: its table, on made-up runs, and --only of bench.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import bench
from benchmarks.harness.results import Process, Run, Step
from benchmarks.two_stacks import MARKS, NONE_YET, PAGE, read_turns, section, write_page

STEP = Step(4.0, {"generation": 2.0, "switch": 0.25, "weight_sync": 0.5}, [], {}, 0.0, 0.0, 0.0)
VERSIONS = {"torch": "2.11.0", "vllm": "0.25.1"}
RUN = Run("step-best-1.7b", "step", "NVIDIA H200", 1, VERSIONS, {}, 0, 0, 0.0, None, [], "", [], 0, [])


def write_turn(repository: Path, stack: str, turn: int, seconds: float, status: str = "ok") -> None:
    process = Process("ours", "tokens16384", status, [replace(STEP, seconds=seconds)], [])
    versions = RUN.versions | {"vllm": stack.removeprefix("vllm-")}
    run = replace(RUN, processes=[process], versions=versions)
    run.write(repository / "benchmarks" / "h200" / "stacks" / f"{stack}-{turn}" / f"{run.name}.json")


def test_the_table_has_the_median_of_each_stacks_turns(tmp_path: Path) -> None:
    for stack, turns in (("vllm-0.25.1", (4.0, 4.5)), ("vllm-0.32.0", (3.0, 3.1))):
        for turn, seconds in enumerate(turns, 1):
            write_turn(tmp_path, stack, turn, seconds)
    text = section(read_turns(tmp_path))
    cells = "| step-best-1.7b | 4.25 (4.00 to 4.50) | 2.00 | 0.75 | 3.05 (3.00 to 3.10) | 2.00 | 0.75 |"
    assert cells in text and "* vllm-0.32.0: torch 2.11.0, vllm 0.32.0" in text


def test_a_run_that_failed_with_one_stack_is_not_compared(tmp_path: Path) -> None:
    write_turn(tmp_path, "vllm-0.25.1", 1, 4.0)
    write_turn(tmp_path, "vllm-0.32.0", 1, 3.0, status="failed")
    assert "step-best-1.7b" not in section(read_turns(tmp_path))


def test_the_page_says_so_while_nothing_is_measured(tmp_path: Path) -> None:
    page = tmp_path / PAGE
    page.parent.mkdir()
    page.write_text(f"before\n{''.join(MARKS)}after\n")
    write_page(tmp_path)
    assert page.read_text() == f"before\n{MARKS[0]}{NONE_YET}{MARKS[1]}after\n"


def test_only_one_trainer_is_measured() -> None:
    settings = ["--ours", "mbs4", "--stock", "mbs4", "--trl", "mbs4"]
    args = bench.parse(["step", "--json", "run.json", "--only", "ours", *settings])
    assert (args.ours, args.stock, args.trl) == (["mbs4"], [], [])

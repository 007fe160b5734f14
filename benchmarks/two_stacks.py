"""Compare two stacks (torch, vLLM, Transformer Engine) by runs of bench.py with this package on one machine.

    bash benchmarks/two_stacks_chain.sh WORK benchmarks/h200/stacks 1400 vllm-0.25.1=FOLDERS vllm-0.32=FOLDERS
    python -m benchmarks.two_stacks report

The chain writes benchmarks/h200/stacks/STACK-TURN/RUN.json. `report` writes their table into docs/versions.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.markdown import lines_of
from benchmarks.harness.other_pages import with_table
from benchmarks.harness.paths import REPOSITORY
from benchmarks.harness.results import Run, Step

PAGE = Path("docs/versions.md")
MARKS = ("<!-- two stacks, by benchmarks/two_stacks.py report -->\n", "<!-- end of two stacks -->\n")
FOLDERS = "benchmarks/*/stacks/*-*"
PACKAGES = ("torch", "vllm", "transformer-engine", "megatron-core")
PHASES = {"generation": ("generation",), "sync": ("switch", "weight_sync", "sync_check")}
NONE_YET = "No machine has run both yet.\n"


@dataclass(frozen=True)
class Turn:
    stack: str
    run: Run

    @property
    def steps(self) -> list[Step]:
        return [step for process in self.run.processes if process.status == "ok" for step in process.steps]


def read_turns(repository: Path) -> list[Turn]:
    return [
        Turn(folder.name.rpartition("-")[0], Run.read(file))
        for folder in sorted(repository.glob(FOLDERS))
        for file in sorted(folder.glob("*.json"))
    ]


def section(turns: Sequence[Turn]) -> str:
    """Return the table of each run's medians with each stack, and the versions of the stacks."""
    if not turns:
        return NONE_YET
    stacks = list(dict.fromkeys(turn.stack for turn in turns))
    steps: dict[tuple[str, str], list[Step]] = defaultdict(list)
    for turn in turns:
        steps[turn.run.name, turn.stack] += turn.steps
    names = [name for name in dict.fromkeys(turn.run.name for turn in turns) if all(steps[name, s] for s in stacks)]
    head = ["run", *(f"{what}, {stack}" for stack in stacks for what in ("step", *PHASES))]
    rows = [[name, *(cell for stack in stacks for cell in _cells(steps[name, stack]))] for name in names]
    of_stack = {turn.stack: turn.run.versions for turn in turns}
    versions = [
        f"* {stack}: {', '.join(f'{name} {found}' for name, found in of_stack[stack].items() if name in PACKAGES)}\n"
        for stack in stacks
    ]
    medians = f"On {turns[0].run.device}, medians in seconds over all turns."
    return f"{medians}\n\n{lines_of([head, *rows])}\n\n{''.join(versions)}"


def _cells(steps: Sequence[Step]) -> list[str]:
    seconds = [step.seconds for step in steps]
    phases = [[sum(step.phases.get(phase, 0.0) for phase in names) for step in steps] for names in PHASES.values()]
    whole = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    return [whole, *(f"{statistics.median(values):.2f}" for values in phases)]


def write_page(repository: Path) -> None:
    page = repository / PAGE
    page.write_text(with_table(page.read_text(), MARKS, section(read_turns(repository))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["report"])
    parser.parse_args()
    write_page(REPOSITORY)


if __name__ == "__main__":
    main()

"""Write the report of a run, or one that compares several, as one HTML file that needs no network.

swift-megatron-grpo report RUN                  writes RUN/report.html
swift-megatron-grpo report RUN RUN [RUN ...]    writes comparison.html in this folder
"""

import argparse
import math
from pathlib import Path

from swift_megatron_grpo.cli.command_line import FINE, Refused
from swift_megatron_grpo.output.report.page import write_report
from swift_megatron_grpo.output.report.run_files import NoRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run: its --output_dir")
    parser.add_argument("--output_file", type=Path, help="default: RUN/report.html, or comparison.html")
    parser.add_argument(
        "--completions_mb", type=_megabytes, default=6.0, help="most megabytes of completions in the page; default: 6"
    )


def run(options: argparse.Namespace) -> int:
    runs: list[Path] = options.runs
    target = options.output_file or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    try:
        write_report(runs, target, int(options.completions_mb * 2**20))
    except (NoRun, OSError) as error:
        raise Refused(error) from error
    print(target)
    return FINE


def _megabytes(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("must be a number of 0 or more")
    return value

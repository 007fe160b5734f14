"""Write the report of a run, or one that compares several, as an HTML file that needs no network.

python -m swift_megatron_grpo.output.report RUN                  writes RUN/report.html
python -m swift_megatron_grpo.output.report RUN RUN [RUN ...]    writes comparison.html in this folder
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.output.report.page import write_report
from swift_megatron_grpo.output.report.run_files import NoRun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swift_megatron_grpo.output.report",
        description="Write the report of a run, or one that compares several, as one HTML file.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run: its --output_dir")
    parser.add_argument("--out", type=Path, help="file to write; default: RUN/report.html, or ./comparison.html")
    parser.add_argument(
        "--completions_mb", type=float, default=6.0, help="most megabytes of completions in the page; default: 6"
    )
    options = parser.parse_args(arguments)
    if options.completions_mb < 0:
        parser.error("--completions_mb must be 0 or more")
    target = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("comparison.html"))
    try:
        write_report(options.runs, target, int(options.completions_mb * 2**20))
    except (NoRun, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

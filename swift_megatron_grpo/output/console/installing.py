"""Replace ms-swift's progress bar and its PNG files, for the time of one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.pipelines.train import sft
from swift.utils import get_logger, is_last_rank

from swift_megatron_grpo.output.console.callback import RunConsole
from swift_megatron_grpo.output.report.live import FILE, LiveReport

logger = get_logger()


@contextmanager
def reported(args: Any) -> Iterator[None]:
    """Around a whole run: print its steps in lines, and write its report, also when it fails."""
    plot_images, callback = sft.plot_images, megatron_callbacks_map["print"]
    writes = is_last_rank()  # the process group is gone at the end
    sft.plot_images, megatron_callbacks_map["print"] = _no_images, RunConsole
    try:
        yield
    finally:
        sft.plot_images, megatron_callbacks_map["print"] = plot_images, callback
        folder = Path(args.output_dir)
        if (folder / "logging.jsonl").is_file():
            if writes:
                LiveReport(folder, logger.warning).update(now=True)
            logger.info(f"report of the run: {folder / FILE}")


def _no_images(*_: Any, **__: Any) -> None:
    """Draw nothing: the report has all curves."""

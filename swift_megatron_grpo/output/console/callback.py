"""The callback that replaces ms-swift's progress bar and PNG files: logging.jsonl, a line per step, and the report."""

import os
import shutil
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.megatron.pipelines.train import sft
from swift.utils import JsonlWriter, format_time, get_logger, is_last_rank

from swift_megatron_grpo.output.console import lines
from swift_megatron_grpo.output.console.stalls import StallWatch
from swift_megatron_grpo.output.report.completions import read_completions
from swift_megatron_grpo.output.report.page import FILE, LiveReport
from swift_megatron_grpo.output.report.run_files import NoRun, read_run
from swift_megatron_grpo.runtime.gpus import find_gpu
from swift_megatron_grpo.runtime.parallel import max_over_ranks
from swift_megatron_grpo.settings.run import Warnings

logger = get_logger()
_CLEAR = "\r\x1b[K"  # the line of a terminal
_TAIL = 256 * 1024  # bytes of completions.jsonl that are read for one completion
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SEGMENTS = "expandable_segments:True"


@contextmanager
def reported(args: Any) -> Iterator[None]:
    """Around a whole run: print its steps in lines, and write its report, also when it fails."""
    plot_images, callback = sft.plot_images, megatron_callbacks_map["print"]
    writes = is_last_rank()  # the process group is gone at the end
    sft.plot_images = lambda *_, **__: None  # the report has all curves, and the folder is not made
    logger.addFilter(is_true := lambda record: not record.getMessage().startswith("images_dir: "))
    megatron_callbacks_map["print"] = RunConsole
    try:
        yield
    finally:
        sft.plot_images, megatron_callbacks_map["print"] = plot_images, callback
        logger.removeFilter(is_true)
        folder = Path(args.output_dir)
        if (folder / "logging.jsonl").is_file():
            if writes:
                LiveReport(folder, logger.warning).update(now=True)
            logger.info(f"report of the run: {folder / FILE}")


def peak_tflops(ranks: int) -> float | None:
    """Return the FLOPs that all GPUs of a run have in bf16, in TFLOP/s; None on a CPU and on GPUs of unknown speed."""
    if not torch.cuda.is_available():
        return None
    try:
        return find_gpu(torch.cuda.get_device_name()).bf16_tflops * ranks
    except ValueError:
        return None


def stall_watch(folder: Path, steps_done: int) -> StallWatch:
    """Continue with the log of a run that resumes in its folder, which may have steps after the checkpoint."""
    try:
        log = read_run(folder).training
    except NoRun:
        return StallWatch({})
    rows = bisect_right(log.steps, steps_done)
    return StallWatch({name: values[:rows] for name, values in log.values.items()})


def retries_so_far() -> int:
    """Return the number on this GPU since the start of the process, 0 before it uses the GPU."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class AllocatorRetries:
    """Counts how often PyTorch's allocator gave its cache back to the GPU, and waited for it, before it found room.

    A run close to the limit of a GPU does so in every step if its micro batches differ in length, without an error.
    """

    def __init__(self, read: Callable[[], int] = retries_so_far) -> None:
        self._read, self._seen = read, read()
        self._logs, self._has_warned = 0, False

    def since_last_log(self) -> int:
        before, self._seen = self._seen, self._read()
        return self._seen - before

    def warning(self, retries: int, budget: str) -> str | None:
        """Warn once, but not of the first step, which allocates all for the first time. `budget`: flag and value."""
        self._logs += 1
        if not retries or self._logs == 1 or self._has_warned:
            return None
        self._has_warned = True
        has_segments = any(SEGMENTS in os.environ.get(name, "") for name in SETTINGS)
        remedy = f"lower {budget}" if has_segments else f"set {SETTINGS[1]}={SEGMENTS}, or lower {budget}"
        return (
            f"PyTorch's allocator found no room {retries} times since the last log, gave its cache back to the GPU "
            f"and waited for it, which makes steps slower: {remedy}"
        )


class RunConsole(MegatronCallback):
    """Runs on every rank; one of them prints and writes."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._writes = is_last_rank()
        self._is_terminal = self._writes and sys.stdout.isatty()
        folder = Path(self.args.output_dir)
        self._folder = folder
        # Not in a thread, as ms-swift does: the last steps would be lost at the end, and the report reads the file.
        self._log = JsonlWriter(str(folder / "logging.jsonl"), strict=False, write_on_rank="last")
        self._report = LiveReport(folder, logger.warning)
        self._peak = peak_tflops(self.args.global_world_size)
        self._lines = 0
        self._evaluated = 0
        self._length: float | None = None  # of the completions of the last rollout, in tokens
        self._seconds: deque[float] = deque(maxlen=self.args.steps_per_rollout)  # of the steps of one rollout
        self._phases: dict[str, None] = {}  # that have occurred
        self._allocator = AllocatorRetries()

    def on_train_begin(self) -> None:
        args, step = self.args, self.state.iteration
        self._start = self._logged_at = time.monotonic()
        self._start_step = self._logged_step = step
        self._pace = lines.Pace(step, args.train_iters, self._start, args.steps_per_rollout)
        watches = self._writes and args.of(Warnings).watches_stalls
        self._stalls = stall_watch(self._folder, step) if watches else None
        logger.info(f"logging_path: {self._folder / 'logging.jsonl'}")
        self._show_status("starting")

    def on_step_begin(self) -> None:
        self._show_status(f"rollout {self._rollout(self.state.iteration)}")

    def on_step_end(self) -> None:
        self._pace.finish(self.state.iteration, time.monotonic())

    def on_train_end(self) -> None:
        if self._is_terminal:
            print(_CLEAR, end="", flush=True)

    def on_eval_begin(self) -> None:
        self._evaluated = 0

    def on_eval_step(self) -> None:
        self._evaluated += 1
        self._show_status(f"evaluation {self._evaluated}/{self.args.eval_iters}")

    def on_log(self, logs: dict[str, Any]) -> None:
        """Complete the metrics with ms-swift's own names, which trackers also get, and write and print them."""
        state, args, now = self.state, self.args, time.monotonic()
        elapsed, steps = now - self._start, state.iteration - self._start_step
        is_evaluation = any(name.startswith("eval_") for name in logs)
        seconds = None if is_evaluation else self._time_of_a_step(now)
        if seconds is not None:
            logs.update(self._speed(logs, seconds))
        logs["iteration"] = f"{state.iteration}/{args.train_iters}"
        logs["elapsed_time"] = format_time(elapsed)
        pace = elapsed / steps if steps > 0 else 0.0
        remaining = self._pace.remaining
        logs["remaining_time"] = format_time(
            (args.train_iters - state.iteration) * pace if remaining is None else remaining
        )
        logs.update(self._of_the_fullest_gpu())
        logs["train_speed(s/it)"] = round(pace, 6)
        if not self._writes:
            return
        if warning := self._allocator.warning(int(logs["speed/allocator_retries"]), self._budget()):
            logger.warning(warning)
        rounded = {name: round(value, 8) if isinstance(value, float) else value for name, value in logs.items()}
        self._log.append(rounded)
        metrics = {name: value for name, value in rounded.items() if isinstance(value, int | float)}
        if is_evaluation:
            self._print(lines.evaluation_line(state.iteration, metrics))
        else:
            self._print_step(metrics, seconds)
            for stall in self._stalls.report(metrics) if self._stalls is not None else ():
                self._print(f"  warning: {stall} (--stall_warnings false: no such lines)")
        self._report.update()

    def _of_the_fullest_gpu(self) -> dict[str, float]:
        values = [torch.cuda.max_memory_reserved() / 2**30, self._allocator.since_last_log()]
        memory, retries = max_over_ranks(torch.tensor(values, device=torch.cuda.current_device())).tolist()
        return {"memory(GiB)": round(memory, 2), "speed/allocator_retries": retries}

    def _budget(self) -> str:
        """Return the flag that determines the size of micro batches, with its value."""
        tokens = self.args.max_tokens_per_micro_batch
        if tokens is None:
            return f"--micro_batch_size {self.args.micro_batch_size}"
        return f"--max_tokens_per_micro_batch {tokens}"

    def _rollout(self, steps_done: int) -> int:
        """Return the number of the rollout that the next step trains, as in completions.jsonl."""
        return int(steps_done // self.args.steps_per_rollout)

    def _time_of_a_step(self, now: float) -> float | None:
        count = self.state.iteration - self._logged_step
        seconds = (now - self._logged_at) / count if count > 0 else None
        self._logged_at, self._logged_step = now, self.state.iteration
        return seconds

    def _speed(self, logs: dict[str, Any], seconds: float) -> dict[str, float]:
        """Return the completion tokens of a step by its whole time, over a rollout's steps: one of them generates."""
        self._length = logs.get("completions/mean_length", self._length)
        self._seconds.append(seconds)
        metrics: dict[str, float] = {}
        if self._length is not None and "loss" in logs:
            metrics["speed/tokens_per_second"] = self._length * self.args.global_batch_size / fmean(self._seconds)
        if self._peak is not None and logs.get("time/train"):
            metrics["speed/mfu"] = logs["speed/train_tflop"] / (logs["time/train"] * self._peak)
        return metrics

    # ---- what is printed

    def _print_step(self, metrics: dict[str, float], seconds: float | None) -> None:
        step, total = self.state.iteration, self.args.train_iters
        new = [phase for phase in lines.phases_of(metrics) if phase not in self._phases]
        self._phases |= dict.fromkeys(new)
        widest = max(f"{total}/{total}", "step", key=len)
        if self._lines % lines.HEADER_EVERY == 0:
            self._print_a_completion()
            self._print(lines.header(widest))
        rollout = max(self._rollout(step - 1), 0)
        self._print(lines.step_line(f"{step}/{total}", rollout, metrics, seconds, self._pace.remaining, len(widest)))
        if new:
            self._print(f"  phases: {lines.legend(new)}")
        self._lines += 1

    def _print_a_completion(self) -> None:
        try:
            completions = read_completions(self._folder, _TAIL)
        except OSError:
            return  # it is only shown; whoever writes the file reports what is wrong with it
        if completions is not None and completions.rows:
            row = completions.rows[-1]
            self._print(lines.completion_line(row.rollout, row.total, row.text))

    def _print(self, line: str) -> None:
        print(f"{_CLEAR if self._is_terminal else ''}{line}", flush=True)

    def _show_status(self, what: str) -> None:
        if not self._is_terminal:
            return
        width = shutil.get_terminal_size().columns
        elapsed, step = time.monotonic() - self._start, self.state.iteration
        print(
            _CLEAR + lines.status(step, self.args.train_iters, what, elapsed, self._pace.remaining, width),
            end="",
            flush=True,
        )

"""The request to stop a run: received by any rank, known to all within a second; all act on it at the same place."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

import torch.distributed as dist

from swift_megatron_grpo.runtime.failures import SharedFailure
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.runtime.stopping.signals import StopSignals

_POLL_SECONDS = 1.0  # between two looks at the requests of other ranks
# A launcher may send the same signal to every process, and another process forwards it: this is one request.
_SAME_REQUEST_SECONDS = 1.0
# If the launcher is killed, the kernel sends the signal once for each of its threads that the rank becomes a child of.
# They end one after the other, which took seconds on a busy machine.
_SAME_DEATH_SECONDS = 15.0
_LEAVE_POLL_SECONDS = 0.05
_STEP_SHARE = 0.5  # of the grace for the current step; the rest is for the checkpoint


class RunStopped(SharedFailure):
    """The run stops at a signal. Every rank raises this at the same place."""


class StopRequest:
    """The request to stop, as one rank sees it. Every rank has one."""

    def __init__(self, coordinator: Coordinator, grace: float) -> None:
        """`grace`: seconds from the signal until all processes must have ended (--stop_grace)."""
        self._coordinator, self._grace = coordinator, grace
        self._parent = os.getppid()
        self._signal: Signals | None = None
        self._received = 0.0
        self._signals: StopSignals | None = None
        self._store: dist.Store | None = None
        self._on_request: Callable[[float], None] | None = None
        self._before_exit: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def listen(self, on_request: Callable[[float], None], before_exit: Callable[[], None]) -> None:
        """Handle signals from now on. Before, they end the process at once, because there is nothing to save.

        A thread calls `on_request` with the seconds that are left once a stop is requested, and `before_exit` before a
        second signal ends the process.
        """
        self._on_request, self._before_exit = on_request, before_exit
        self._store = dist.PrefixStore("swift_megatron_grpo/stop", dist.distributed_c10d._get_default_store())
        self._signals = StopSignals(self._on_signal, self._look_at_others, _POLL_SECONDS)

    def close(self) -> None:
        if self._signals is not None:
            self._signals.close()
            self._signals = None

    # ---- called by the run

    def agreed(self) -> Signals | None:
        """Return the signal at which all ranks stop now. Every rank calls this; it costs one small reduction."""
        number = self._coordinator.max(0 if self._signal is None else int(self._signal))
        return Signals(number) if number else None

    def raise_if_requested(self) -> None:
        """Raise RunStopped on every rank if any of them has received a signal. Every rank calls this."""
        number = self.agreed()
        if number is not None:
            raise RunStopped(f"{number.name} was received")

    def out_of_time(self) -> bool:
        """Return True if the current step has to be given up, to leave time for the checkpoint."""
        return self._signal is not None and time.monotonic() > self._received + _STEP_SHARE * self._grace

    def raise_if_out_of_time(self) -> None:
        """Raise RunStopped on this rank if generation has to be given up."""
        if self.out_of_time():
            raise self.give_up("generation")

    def give_up(self, what: str) -> RunStopped:
        """Return the exception that gives up the current step on all ranks."""
        allowed = _STEP_SHARE * self._grace
        return RunStopped(f"{what} was given up {allowed:g} s after the signal, half of --stop_grace {self._grace:g}")

    def leave_together(self, print_last_line: Callable[[], None]) -> None:
        """Wait until every rank has arrived here, then print the last line on the first rank, and return everywhere.

        A rank that exits makes the launcher end the others, and the first may still be writing the checkpoint. The
        watchdog limits the wait.
        """
        store, is_first = self._store, self._coordinator.rank == 0
        assert store is not None
        with suppress(RuntimeError):  # the store was in torchrun, which has ended, or in a rank that has left
            store.add("arrived", 1)
            self._wait_until(store, "arrived", self._coordinator.world_size)
        if is_first:
            print_last_line()
        with suppress(RuntimeError):
            if is_first:  # leaves last, because the store may be in this rank
                store.add("leaving", 1)
                self._wait_until(store, "left", self._coordinator.world_size - 1)
            else:
                self._wait_until(store, "leaving", 1)
                store.add("left", 1)

    @staticmethod
    def _wait_until(store: dist.Store, key: str, count: int) -> None:
        while store.add(key, 0) < count:
            time.sleep(_LEAVE_POLL_SECONDS)

    # ---- in the thread of the signals

    def _on_signal(self, number: Signals) -> None:
        if self._signal is not None:
            allowed = _SAME_DEATH_SECONDS if self._parent_has_ended() else _SAME_REQUEST_SECONDS
            if time.monotonic() - self._received > allowed:
                self._exit_at_once(number)
            return
        self._request(number)
        first = self._coordinator.rank == 0
        with suppress(RuntimeError):  # the store was in torchrun, which has ended
            assert self._store is not None
            first = self._store.add("requests", 1) == 1
            self._store.set("signal", str(int(number)))
        if first:
            _print(
                f"rank {self._coordinator.rank} received {number.name}: the run stops after the current step and saves "
                f"a checkpoint, within {self._grace:g} s (--stop_grace). A second signal ends it at once"
            )

    def _parent_has_ended(self) -> bool:
        """Return True if the launcher has ended, or at least its first thread."""
        if os.getppid() != self._parent:
            return True
        with suppress(OSError):
            return Path(f"/proc/{self._parent}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return False

    def _look_at_others(self) -> None:
        if self._signal is not None:
            return
        with suppress(RuntimeError):
            assert self._store is not None
            if self._store.check(["signal"]):
                self._request(Signals(int(self._store.get("signal"))))

    def _request(self, number: Signals) -> None:
        self._received, self._signal = time.monotonic(), number
        assert self._on_request is not None
        self._on_request(self._grace)

    def _exit_at_once(self, number: Signals) -> None:
        assert self._before_exit is not None
        self._before_exit()
        _print(f"rank {self._coordinator.rank} received a second signal, {number.name}, and ends at once")
        os._exit(128 + number)


class StoppedBySignal(Exception):
    """The run has saved its checkpoint and released its resources. Every rank raises this."""

    def __init__(self, request: StopRequest, number: Signals, line: str) -> None:
        super().__init__(line)
        self.request, self.number, self.line = request, number, line


def last_line(
    number: Signals,
    step: int,
    steps: int,
    checkpoint: str | None,
    has_adapter: bool,
    has_optimizer: bool,
    finds_checkpoint: bool = False,
) -> str:
    """Return the last line of a stopped run. `finds_checkpoint`: the same command continues (--resume auto)."""
    stopped = f"stopped by {number.name} after step {step} of {steps}"
    if checkpoint is None:
        return f"{stopped}; nothing was saved, because no weights have changed. To continue, start the run again"
    if not has_optimizer:
        flag = "--adapters" if has_adapter else "--model"
        return (
            f"{stopped}; the weights are in {checkpoint}, without the optimizer's state (--no_save_optim true). To "
            f"start a new run from them, use the same command with {flag} {checkpoint}"
        )
    if finds_checkpoint:
        return f"{stopped}; the checkpoint is {checkpoint}. To continue, use the same command again"
    flag = "--mcore_adapter" if has_adapter else "--mcore_model"
    return (
        f"{stopped}; the checkpoint is {checkpoint}. To continue, use the same command with --finetune false {flag} "
        f"{checkpoint}"
    )


@contextmanager
def exit_if_stopped() -> Iterator[None]:
    """Around a whole run: if a signal has stopped it, print the last line and exit with 128 + the signal."""
    try:
        yield
    except StoppedBySignal as stopped:
        atexit._run_exitfuncs()  # of trackers; the rest of Python's exit waits for threads, and libraries print in it
        sys.stdout.flush()
        sys.stderr.flush()
        line = f"swift_megatron_grpo: {stopped.line}"
        stopped.request.leave_together(lambda: print(line, file=sys.stderr, flush=True))
        os._exit(128 + stopped.number)


def _print(line: str) -> None:
    # The line before may be a progress bar, which ends without a line break.
    print(f"\nswift_megatron_grpo: {line}", file=sys.stderr, flush=True)

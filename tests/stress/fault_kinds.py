"""The faults of tests/stress/faults.py: what each does to a run, and how the run has to end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.output.checkpoints.manifest import list_files
from tests.stress.fault_runs import Inputs, Run, is_alive, step_of, whole_checkpoints
from tests.stress.processes import OPEN_FILES_VARIABLE
from tests.support.servers import KEY, RolloutServer

PHASES = ("weight_sync", "generation", "grading", "dump", "train", "saving", "between phases")
SHARED_MEMORY = Path("/dev/shm")
DISK_BYTES = 64 * 2**20  # four checkpoints of 5 MB, and the rest of a run
PHASE_TIMEOUT, SERVER_TIMEOUT = 45, 15  # seconds; flags of runs that something hangs
START_SECONDS = 400.0  # for a run to reach the planned moment, on a busy machine


@dataclass(frozen=True)
class Planned:
    """One fault, at a random moment."""

    kind: str
    detail: str
    step: int  # trained by this run before the fault
    phase: str
    delay: float  # seconds after the start of the phase


@dataclass
class Trial:
    """The run that one fault hits."""

    inputs: Inputs
    planned: Planned
    name: str
    servers: Sequence[RolloutServer] = ()  # only for faults of servers
    run: Run | None = None
    hit: tuple[int, str] = (0, "")  # steps trained and phase when the fault hit; no phase: it has not
    hit_at: float = 0.0  # time.time()
    other_output: str = ""  # of another run, which the fault is about

    def start(self, *flags: str, command: bool = False, **environment: str) -> Run:
        """Continue the training from its newest checkpoint."""
        checkpoints = whole_checkpoints(self.inputs.folder)
        newest = checkpoints[-1] if checkpoints else None
        self.run = Run.start(self.inputs, self.name, newest, flags, environment, command)
        return self.run

    def wait_for_moment(self) -> bool:
        """Wait for the planned moment; return False if the run has ended before."""
        assert self.run is not None
        if not self.run.wait_for(self.planned.step, self.planned.phase, START_SECONDS):
            return False
        time.sleep(self.planned.delay)
        self.mark(*self.run.now())
        return True

    def mark(self, step: int, phase: str) -> None:
        """Record that the fault happens now, in this phase."""
        assert self.run is not None
        self.run.processes()  # remembers those that are about to become orphans
        self.hit, self.hit_at = (self.run.first + step, phase), time.time()


@dataclass(frozen=True)
class Kind:
    name: str
    inject: Callable[[Trial], object]
    reason: str  # pattern of the line of the log that has to state the reason
    goes_on: bool | None = False  # the run trains its next step; None: it may, or it ends
    details: tuple[str, ...] = ("",)
    phases: tuple[str, ...] = PHASES
    weight: int = 1  # how often it is drawn beyond the first two, relative to others
    needs_servers: bool = False


# ---- ranks and launchers


def kill_rank(trial: Trial) -> None:
    run = trial.start(command="torchrun" in trial.planned.detail)
    if trial.wait_for_moment():
        run.rank(int(trial.planned.detail[5])).kill()


def signal_launcher(number: signal.Signals) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        run = trial.start(command=True)
        if trial.wait_for_moment():
            os.kill(run.process.pid, number)

    return inject


def terminate_rank(trial: Trial) -> None:
    run = trial.start()
    if trial.wait_for_moment():
        run.rank(int(trial.planned.detail[5])).terminate()


def stop_rank(trial: Trial) -> None:
    run = trial.start("--phase_timeout", str(PHASE_TIMEOUT))
    if trial.wait_for_moment():
        run.rank(int(trial.planned.detail[5])).suspend()


# ---- servers


def start_with_servers(trial: Trial, timeout: int) -> Run:
    number = 1 if trial.planned.detail.endswith("the only one") else 2
    urls = [server.url for server in trial.servers[:number]]
    return trial.start(
        "--vllm_mode", "server", "--vllm_server_base_url", *urls, "--vllm_server_timeout", str(timeout),
        **{API_KEY_VARIABLE: KEY})  # fmt: skip


def kill_server(trial: Trial) -> None:
    """Kill a server, or one of its processes, and start it again once all have ended, as a supervisor does."""
    start_with_servers(trial, 400)
    if not trial.wait_for_moment():
        return
    server = trial.servers[0]
    processes = server.processes()
    chosen = {"all": processes, "engine": engines_in(processes), "web server": processes[:1]}
    for process in chosen[trial.planned.detail.split(",")[0]]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + 60
    while any(map(is_alive, processes)):
        if time.monotonic() > deadline:
            raise RuntimeError("processes of a killed server still ran after 60 s")
        time.sleep(0.1)
    server.kill()
    server.start()


def engines_in(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if "EngineCore" in " ".join([process.name(), *process.cmdline()])]


def stop_server(trial: Trial) -> None:
    """Stop a server for so long that the run gives it up; then it continues, as after a network partition."""
    start_with_servers(trial, SERVER_TIMEOUT)
    if not trial.wait_for_moment():
        return
    stopped = trial.servers[0].processes()
    for process in stopped:
        process.suspend()
    time.sleep(2 * SERVER_TIMEOUT)
    for process in stopped:
        process.resume()


# ---- disks and limits


def fill_disk(which: str) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        trial.start()
        if trial.wait_for_moment():
            disk = (trial.inputs.folder if which == "run" else trial.inputs.dump).parent
            with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**12))

    return inject


def make_read_only(trial: Trial) -> None:
    if trial.planned.detail == "at the start":
        cover_read_only(trial.inputs)
        trial.start()
        trial.mark(0, "start")
    else:
        trial.start()
        if trial.wait_for_moment():
            cover_read_only(trial.inputs)


def cover_read_only(inputs: Inputs) -> None:
    """Mount the folder over itself, read-only: a remount is refused while a file in it is open for writing."""
    disk = str(inputs.folder.parent)
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)


def limit_open_files(trial: Trial) -> None:
    trial.start(**{OPEN_FILES_VARIABLE: trial.planned.detail})
    trial.mark(0, "start")


def shrink_shared_memory(trial: Trial) -> None:
    mount_memory(SHARED_MEMORY, trial.planned.detail)
    trial.start()
    trial.mark(0, "start")


def mount_memory(path: Path, size: str | int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)


def restore(trial: Trial) -> None:
    """Undo a fault of a disk or of shared memory before the next run."""
    inputs = trial.inputs
    over = {"small /dev/shm": SHARED_MEMORY, "read-only output folder": inputs.folder.parent}
    if trial.planned.kind in over and trial.hit[1]:
        subprocess.run(["umount", "-l", str(over[trial.planned.kind])], check=True)
    for folder in (inputs.folder, inputs.dump):
        (folder.parent / "ballast").unlink(missing_ok=True)


# ---- files


def start_second_run(trial: Trial) -> None:
    """Start the same command again while the first run continues."""
    trial.start()
    if not trial.wait_for_moment():
        return
    assert trial.run is not None
    checkpoints = whole_checkpoints(trial.inputs.folder)
    other = trial.inputs.dump.with_name("other") if trial.planned.detail == "another dump" else None
    second = Run.start(
        trial.inputs, f"{trial.name}-second", checkpoints[-1] if checkpoints else None, dump=other
    )  # fmt: skip
    second.wait_for_exit(START_SECONDS)
    refused = second.kill() == 0 and second.process.wait() != 0
    if refused:
        trial.other_output = "".join(f"second run: {line}\n" for line in second.output.splitlines())


def truncate_checkpoint(trial: Trial) -> None:
    """Cut off a file of the newest checkpoint and resume from it; the next run continues from the one before."""
    newest = whole_checkpoints(trial.inputs.folder)[-1]
    files = list_files(newest)
    chosen = random.Random(trial.name)
    name = chosen.choice(sorted(name for name, size in files.items() if size > 0))
    os.truncate(newest / name, chosen.randrange(files[name]))
    trial.start()
    trial.mark(0, f"start, {name}")
    assert trial.run is not None
    trial.run.wait(START_SECONDS)
    newest.rename(newest.with_name(f"damaged-{step_of(newest)}"))


SERVER_PHASES = ("weight_sync", "generation", "train")
RANK_DETAILS = ("rank 0", "rank 1")
SECOND_REFUSED = r"second run: .*(in use by|holds rollouts of) another run.*"
STOPPED = r"stopped by SIGTERM after step \d+ of .*|SIGTERM ended the run before its first step.*"
KINDS = (
    Kind("SIGTERM to a rank", terminate_rank, STOPPED, details=RANK_DETAILS),
    Kind("SIGKILL to a rank", kill_rank, r"Signal 9 \(SIGKILL\) received by PID|rank \d ended with exit code -9",
         details=("rank 0", "rank 1 of torchrun", "rank 1"), weight=2),
    Kind("SIGTERM to the launcher", signal_launcher(signal.SIGTERM), STOPPED, weight=0),
    Kind("SIGKILL to the launcher", signal_launcher(signal.SIGKILL), STOPPED, weight=0),
    Kind("SIGSTOP to a rank", stop_rank, r"(phase|logging).* has not finished after \d+ s.*",
         details=RANK_DETAILS),
    Kind("SIGKILL to a server", kill_server, "rollout server .* is lost: .*", goes_on=True, phases=SERVER_PHASES,
         details=("all", "engine", "web server", "all, the only one"), weight=2, needs_servers=True),
    Kind("SIGSTOP to a server", stop_server, "rollout server .* is lost: .*", goes_on=True, phases=SERVER_PHASES,
         needs_servers=True),
    Kind("full disk of checkpoints", fill_disk("run"), "no space: .*", phases=("saving", "train", "generation")),
    Kind("full disk of the dump", fill_disk("dump"), "no space: .*", phases=("dump", "train", "weight_sync")),
    Kind("read-only output folder", make_read_only, "[Rr]ead-only.*", details=("later", "at the start")),
    Kind("ulimit -n", limit_open_files, r".*(Too many open files|ulimit).*", goes_on=None, details=("256", "64")),
    Kind("small /dev/shm", shrink_shared_memory, ".*(No space left on device|/dev/shm).*", goes_on=None,
         details=("1m", "64k")),
    Kind("two runs in one folder", start_second_run, SECOND_REFUSED, goes_on=True,
         details=("same dump", "another dump"), phases=("train", "generation")),
    Kind("truncated checkpoint", truncate_checkpoint, "--mcore_model .*", weight=2),
)  # fmt: skip

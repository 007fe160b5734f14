"""The faults of tests/stress/faults.py: what each does to a run, and how the run has to end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from swift_megatron_grpo.checkpoints.manifest import list_files
from swift_megatron_grpo.protocol.api_key import API_KEY_VARIABLE
from tests.e2e.servers import KEY, RolloutServer
from tests.stress.fault_runs import Inputs, Run, newest_checkpoint
from tests.stress.processes import OPEN_FILES_VARIABLE

PHASES = ("weight_sync", "generation", "grading", "dump", "train", "saving", "between phases")
STEPS_OF_A_RUN_THAT_GOES_ON = 6
SHARED_MEMORY = Path("/dev/shm")
TMPFS_BYTES = 48 * 2**20  # three checkpoints of 5 MB and the rest of a run
PHASE_TIMEOUT, SERVER_TIMEOUT = 30, 15  # seconds; flags of a run that hangs


@dataclass(frozen=True)
class Planned:
    """One fault, at a random moment."""

    kind: str
    detail: str
    step: int  # steps trained before it
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
    hit: tuple[int, str] = (0, "start")  # step and phase in which the fault hit
    hit_at: float = 0.0  # time.time()
    mounts: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.inputs.work / self.name / "run"

    @property
    def dump(self) -> Path:
        return self.inputs.work / self.name / "dump"

    def start(self, *flags: str, command: bool = False, **environment: str) -> Run:
        self.folder.parent.mkdir(exist_ok=True)
        self.run = Run.start(
            self.inputs, self.folder, self.dump, self.name, flags, environment=environment, command=command
        )
        return self.run

    def wait_for_moment(self) -> bool:
        """Wait for the planned moment; return False if the run has ended before."""
        assert self.run is not None
        if not self.run.wait_for(self.planned.step, self.planned.phase, 240):
            return False
        time.sleep(self.planned.delay)
        self.mark()
        return True

    def mark(self) -> None:
        """Record that the fault happens now."""
        assert self.run is not None
        self.hit, self.hit_at = self.run.now(), time.time()
        self.run.processes()  # remembers those that are about to become orphans

    def mount(self, path: Path, *options: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *options, str(path)], check=True)
        self.mounts.append(path)

    def unmount(self) -> None:
        while self.mounts:
            subprocess.run(["umount", "-l", str(self.mounts.pop())], check=True)


@dataclass(frozen=True)
class Kind:
    name: str
    inject: Callable[[Trial], object]
    reasons: str  # pattern of the line that has to state the reason, empty: a run that goes on needs none
    goes_on: bool | None = False  # the run trains all of its steps; None: it may, or it ends
    details: tuple[str, ...] = ("",)
    phases: tuple[str, ...] = PHASES
    first_step: int = 1  # steps trained before the fault, at least
    needs_servers: bool = False


def kill_rank(trial: Trial) -> None:
    run = trial.start("--train_iters", "1000", command=True)
    if trial.wait_for_moment():
        run.rank(int(trial.planned.detail[-1])).kill()


def signal_launcher(number: signal.Signals) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        run = trial.start("--train_iters", "1000", command=True)
        if trial.wait_for_moment():
            os.kill(run.process.pid, number)

    return inject


def terminate_rank(trial: Trial) -> None:
    run = trial.start("--train_iters", "1000")
    if trial.wait_for_moment():
        run.rank(int(trial.planned.detail[-1])).terminate()


def stop_rank(trial: Trial) -> None:
    run = trial.start("--train_iters", "1000", "--phase_timeout", str(PHASE_TIMEOUT))
    if trial.wait_for_moment():
        run.rank(int(trial.planned.detail[-1])).suspend()


# ---- servers


def with_servers(trial: Trial, timeout: int) -> Run:
    number = 1 if trial.planned.detail.endswith("the only one") else 2
    urls = [server.url for server in trial.servers[:number]]
    return trial.start(
        "--train_iters", str(STEPS_OF_A_RUN_THAT_GOES_ON), "--vllm_mode", "server", "--vllm_server_base_url", *urls,
        "--vllm_server_timeout", str(timeout), **{API_KEY_VARIABLE: KEY})  # fmt: skip


def parts(server: RolloutServer, which: str) -> list[psutil.Process]:
    processes = server.processes()
    if which == "all":
        return processes
    engines = [process for process in processes if "EngineCore" in " ".join([process.name(), *process.cmdline()])]
    return engines[:1] if which == "engine" else processes[:1]


def kill_server(trial: Trial) -> None:
    with_servers(trial, 300)
    server = trial.servers[0]
    if not trial.wait_for_moment():
        return
    for process in parts(server, trial.planned.detail.split(",")[0]):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    restart(server)


def restart(server: RolloutServer) -> None:
    """Restart a server whose processes were killed, once all have ended, as a supervisor would."""
    assert server.process is not None
    deadline = time.monotonic() + 30
    while server.process.poll() is None or any_in_session(server.process.pid):
        if time.monotonic() > deadline:
            raise RuntimeError("processes of a killed server still run after 30 s")
        time.sleep(0.1)
    server.process.wait()
    server.start()


def any_in_session(session: int) -> bool:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def stop_server(trial: Trial) -> None:
    """Stop a server for so long that the run gives it up; then it goes on, as after a network partition."""
    with_servers(trial, SERVER_TIMEOUT)
    if not trial.wait_for_moment():
        return
    stopped = parts(trial.servers[0], "all")
    for process in stopped:
        process.suspend()
    time.sleep(2 * SERVER_TIMEOUT)
    for process in stopped:
        process.resume()


# ---- disks and limits


def fill(folder: Path) -> None:
    """Write a file until the disk is full."""
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


def fill_disk(where: str) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        disk = trial.inputs.work / trial.name / "disk"
        trial.mount(disk, "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs")
        run = trial.start("--train_iters", "1000", where, str(disk / "files"))
        if where == "--output_dir":
            run.folder = disk / "files"
        else:
            run.dump = disk / "files"
        if trial.wait_for_moment():
            fill(disk)

    return inject


def limit_open_files(trial: Trial) -> None:
    trial.start("--train_iters", "3", **{OPEN_FILES_VARIABLE: trial.planned.detail})
    trial.mark()


def shrink_shared_memory(trial: Trial) -> None:
    trial.mount(SHARED_MEMORY, "-t", "tmpfs", "-o", f"size={trial.planned.detail}", "tmpfs")
    trial.start("--train_iters", "3")
    trial.mark()


def make_read_only(trial: Trial) -> None:
    disk = trial.inputs.work / trial.name / "disk"
    trial.mount(disk, "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs")
    if trial.planned.detail == "at the start":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    run = trial.start("--train_iters", "1000", "--output_dir", str(disk / "files"))
    run.folder = disk / "files"
    if trial.planned.detail == "at the start":
        trial.mark()
    elif trial.wait_for_moment():
        # a remount is refused while a file is open for writing, so another file system covers the folder
        subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
        trial.mounts.append(disk)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


def restore(trial: Trial) -> None:
    """Undo a fault of a disk or of shared memory before the next run."""
    for disk in reversed(trial.mounts):
        if disk == SHARED_MEMORY:
            trial.unmount()
            return
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=False)
        (disk / "ballast").unlink(missing_ok=True)


# ---- files


def start_second_run(trial: Trial) -> None:
    """Start the same command again while the first run goes on."""
    run = trial.start("--train_iters", str(STEPS_OF_A_RUN_THAT_GOES_ON))
    if not trial.wait_for_moment():
        return
    flags = ["--train_iters", "3"]
    dump = trial.dump.with_name("dump-2") if trial.planned.detail == "another dump" else trial.dump
    second = Run.start(trial.inputs, trial.folder, dump, f"{trial.name}-second", flags)
    second.wait_for_exit(240)
    refused = second.kill() == 0 and second.process.wait() != 0
    with run.log.open("a") as log:
        log.write("".join(f"second run: {line}\n" for line in second.output.splitlines()))
        log.write(f"second run: {'refused' if refused else 'was not refused'}\n")


def truncate_checkpoint(trial: Trial) -> None:
    """Cut off a file of the newest checkpoint and resume from it."""
    first = trial.start("--train_iters", "2")
    first.wait_for_exit(240)
    newest = newest_checkpoint(first.folder)
    assert newest is not None, first.output[-3000:]
    chosen = random.Random(trial.name)
    files = list_files(newest)
    name = chosen.choice(sorted(name for name in files if files[name] > 0))
    os.truncate(newest / name, chosen.randrange(files[name]))
    refused = Run.start(
        trial.inputs, trial.folder, trial.dump, f"{trial.name}-refused",
        ["--finetune", "false", "--mcore_model", str(newest), "--train_iters", "4"])  # fmt: skip
    trial.hit, trial.hit_at = (2, f"resume: {name}"), time.time()
    refused.wait_for_exit(240)
    trial.run = Run(first.folder, first.dump, refused.process, refused.log, first.events_file, refused.seen)


STOPPED = r"stopped by SIGTERM after step \d+ of .*|SIGTERM ended the run before its first step.*"
KINDS = (
    Kind("SIGKILL to a rank", kill_rank, r"Signal 9 \(SIGKILL\) received by PID", details=("rank 0", "rank 1")),
    Kind("SIGKILL to the launcher", signal_launcher(signal.SIGKILL), STOPPED),
    Kind("SIGTERM to the launcher", signal_launcher(signal.SIGTERM), STOPPED),
    Kind("SIGTERM to a rank", terminate_rank, STOPPED, details=("rank 0", "rank 1")),
    Kind("SIGSTOP to a rank", stop_rank, r"has not finished after \d+ s", details=("rank 0", "rank 1")),
    Kind("SIGKILL to a server", kill_server, "rollout server .* is lost: .*", goes_on=True,
         details=("all", "engine", "web server", "all, the only one"), needs_servers=True,
         phases=("weight_sync", "generation", "grading", "train", "between phases")),
    Kind("SIGSTOP to a server", stop_server, "rollout server .* is lost: .*|", goes_on=True, details=("all",),
         phases=("weight_sync", "generation", "train"), needs_servers=True),
    Kind("full disk, checkpoints", fill_disk("--output_dir"), r"no space: .*", phases=("saving", "train"),
         first_step=2),
    Kind("full disk, rollout dump", fill_disk("--rollout_dump"), r"no space: .*", phases=("dump", "train"),
         first_step=2),
    Kind("ulimit -n", limit_open_files, r".*(--|ulimit|[Oo]pen files).*", goes_on=None, details=("256", "128", "64")),
    Kind("small /dev/shm", shrink_shared_memory, ".*", goes_on=None, details=("64k", "1m", "64m")),
    Kind("read-only output folder", make_read_only, r".*Read-only file system.*|.*read-only.*",
         details=("at the start", "later"), first_step=2),
    Kind("two runs in one folder", start_second_run, r"second run: .*--output_dir.*|second run: .*--rollout_dump.*",
         goes_on=True, details=("same dump", "another dump")),
    Kind("truncated checkpoint", truncate_checkpoint, r"--mcore_model .* is damaged.*|--mcore_model .*"),
)  # fmt: skip

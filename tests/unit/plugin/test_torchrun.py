"""torchrun passes signals on to its ranks, waits for them and returns their exit code: real torchrun, small ranks."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swift_megatron_grpo.arguments.environment import import_plugin
from swift_megatron_grpo.generation.conversations.checks import check_max_turns
from swift_megatron_grpo.plugin.torchrun import ended_ranks
from swift_megatron_grpo.runtime.refusals import is_caused_by_bug, is_raised_by_package
from tests.forking.client import free_port, start_piped
from tests.paths import IMPORT_PATH

# What a rank does; `ready` tells the test that it has started, and waits for the other rank.
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def ready():
    open(f"ready{rank}", "w").write(str(os.getpid()))
    while not (os.path.exists("ready0") and os.path.exists("ready1")):
        time.sleep(0.05)
def stop(number, _):
    time.sleep(1)  # the current step, and the checkpoint
    open(f"stopped{rank}", "w").write("x")
    os._exit(128 + number)
if "stops" in sys.argv:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
if "ignores" in sys.argv or ("fails" in sys.argv and rank == 1):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "imports" in sys.argv:
    import torch  # which activates the package
    signal.signal(signal.SIGTERM, stop)
if "refuses" in sys.argv:
    from swift_megatron_grpo.runtime.refusals import reported_by_torchrun
    with reported_by_torchrun():
        ready()
        if rank == 1:
            time.sleep(60)  # for rank 0, as ranks do that wait for it to read a dataset
        time.sleep(1)
        raise ValueError("--lr 0 must be above 0; use --lr 1e-06")
if "cannot-be-set-up" in sys.argv or "has-a-bug" in sys.argv:
    from swift_megatron_grpo.runtime.refusals import set_up_reported_by_torchrun
    from swift_megatron_grpo.runtime.parallel import Coordinator
    from swift_megatron_grpo.generation.conversations.checks import check_max_turns
    import contextlib, datetime, torch.distributed
    torch.distributed.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        stack.callback(time.sleep, 4)  # what closes files and processes may take time
        stack.enter_context(set_up_reported_by_torchrun())
        ready()
        time.sleep(1)
        number = "many" if "has-a-bug" in sys.argv else 0
        check = check_max_turns if rank == 1 else (lambda n: None)
        Coordinator(datetime.timedelta(seconds=60)).all_gather_or_raise(lambda: check(number), "checking")
if "has-a-wrong-parser" in sys.argv:
    from swift_megatron_grpo.runtime.refusals import reported_by_torchrun
    with reported_by_torchrun():
        ready()
        time.sleep(1)
        int("many")
ready()
if "follows" in sys.argv and rank == 0:
    while not os.path.exists("killed"):
        time.sleep(0.05)
    raise ConnectionError("rank 1 has closed its connection")
if "fails" in sys.argv and rank == 0:
    raise ValueError("a step failed")
time.sleep(60)
"""


class Torchrun:
    """torchrun with two ranks, both started, in a fork that has imported what ranks import. tests/e2e starts it as
    users do. It forks ranks that are scripts, and starts a process for one that is a module, or for each on a GPU.
    """

    def __init__(self, folder: Path, how: str, *flags: str, rank: str = "script", **environ: str) -> None:
        self.folder = folder
        script = folder / "swift" / "cli" / "_megatron" / "rlhf.py"
        script.parent.mkdir(parents=True)
        script.write_text(RANK)
        if rank == "module":
            for package in list(script.parents)[:3]:
                (package / "__init__.py").touch()
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [torchrun, "--nproc_per_node", "2", "--master_port", str(free_port())]
        command += [str(script)] if rank == "script" else ["-m", "swift.cli._megatron.rlhf"]
        command += ["--rlhf_type", "grpo", how, *flags]
        environ["PYTHONPATH"] = f"{folder}:{IMPORT_PATH}" if rank == "module" else IMPORT_PATH
        self.process, self._output = start_piped("trainer", "torchrun", *command, folder=folder, **environ)
        end = time.monotonic() + 60
        while not all(self.pid_file(rank).exists() for rank in (0, 1)) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)  # torchrun has set its handlers

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def pid_file(self, rank: int) -> Path:
        return self.folder / f"ready{rank}"

    def finish(self) -> tuple[int, str, float]:
        """Return exit code, output and the seconds that it took."""
        began = time.monotonic()
        code = self.process.wait(timeout=90)
        with self._output:
            return code, self._output.read(), time.monotonic() - began

    def ranks_are_gone(self) -> bool:
        return not any(Path(f"/proc/{self.pid_file(rank).read_text()}").exists() for rank in (0, 1))


@pytest.mark.parametrize("rank", ["script", "module"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_ranks_stop_and_their_exit_code_is_returned(
    tmp_path: Path, number: signal.Signals, rank: str
) -> None:
    torchrun = Torchrun(tmp_path, "stops", rank=rank)
    torchrun.send_signal(number)
    code, output, _ = torchrun.finish()
    assert code == 128 + number
    assert (tmp_path / "stopped0").exists() and (tmp_path / "stopped1").exists()
    assert output == ""  # the ranks of a real run print the cause


def test_before_training_a_signal_ends_the_ranks_at_once(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "waits")
    torchrun.send_signal(signal.SIGTERM)
    code, output, seconds = torchrun.finish()
    assert code == 143 and seconds < 5
    assert output == "swift_megatron_grpo: SIGTERM ended the run before its first step; nothing was saved\n"


def test_a_second_signal_ends_ranks_that_do_not_react(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "ignores")
    torchrun.send_signal(signal.SIGTERM)
    time.sleep(1)
    torchrun.send_signal(signal.SIGTERM)
    code, output, seconds = torchrun.finish()
    assert code == 143 and 3 < seconds < 20
    assert "local ranks 0, 1 did not stop in time after SIGTERM and were killed" in output
    assert torchrun.ranks_are_gone()


def test_ranks_that_exceed_the_grace_are_killed(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "ignores", "--stop_grace", "1")
    torchrun.send_signal(signal.SIGTERM)
    code, output, seconds = torchrun.finish()
    assert code == 143 and seconds < 40
    assert "did not stop in time after SIGTERM" in output and "--stop_grace 1" in output
    assert torchrun.ranks_are_gone()


def test_if_a_rank_fails_the_others_are_killed_and_not_asked_to_stop(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "fails")
    code, output, seconds = torchrun.finish()
    assert code == 1 and seconds < 15  # torch alone would wait for 30 s
    assert "ValueError: a step failed" in output and "ChildFailedError" in output
    assert torchrun.ranks_are_gone()


def test_the_rank_that_failed_first_is_the_reason(tmp_path: Path) -> None:
    said = tmp_path / "said"
    Torchrun(tmp_path, "fails", SWIFT_MEGATRON_GRPO_FAILURE=str(said)).finish()
    assert said.read_text() == "rank 0 has ended: exit code 1"  # torchrun has killed rank 1 in the same second


def test_a_killed_rank_is_the_reason_and_not_one_that_follows(tmp_path: Path) -> None:
    said = tmp_path / "said"
    torchrun = Torchrun(tmp_path, "follows", SWIFT_MEGATRON_GRPO_FAILURE=str(said))
    torchrun.send_signal(signal.SIGSTOP)  # a busy machine
    following, killed = (psutil.Process(int(torchrun.pid_file(rank).read_text())) for rank in (0, 1))
    killed.kill()
    (tmp_path / "killed").touch()
    end = time.monotonic() + 30
    while following.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    torchrun.send_signal(signal.SIGCONT)
    torchrun.finish()
    assert said.read_text() == "rank 1 has ended: killed by signal 9"


def test_a_killed_rank_that_ends_after_one_that_follows_is_known() -> None:
    commands = ["exit 1", "sleep 0.2; kill -9 $$", "sleep 60", "sleep 0.2; exit 1", "sleep 0.2; kill -TERM $$"]
    ranks = dict(enumerate(subprocess.Popen(["sh", "-c", f"exec 2> /dev/null; {each}"]) for each in commands))
    ranks[0].wait()
    try:
        assert ended_ranks(ranks) == [0, 1]
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def test_ranks_stop_if_torchrun_is_killed(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "imports")
    torchrun.send_signal(signal.SIGKILL)
    torchrun.finish()
    assert (tmp_path / "stopped0").exists() and (tmp_path / "stopped1").exists()


def test_a_refused_run_ends_with_one_message(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "refuses")
    code, output, seconds = torchrun.finish()
    assert code == 1 and seconds < 15
    message = "this run was refused before a model was loaded:\n--lr 0 must be above 0; use --lr 1e-06\n"
    assert output == f"swift_megatron_grpo: {message}"
    assert torchrun.ranks_are_gone()


def test_an_error_of_the_set_up_is_one_message_of_the_rank_that_failed(tmp_path: Path) -> None:
    torchrun = Torchrun(tmp_path, "cannot-be-set-up")
    code, output, seconds = torchrun.finish()
    assert code == 1 and seconds < 15
    message = (
        "this run was refused while it was set up:\nmax_turns must be > 0, got 0; leave --max_turns out for no limit\n"
    )
    assert output == f"swift_megatron_grpo: {message}"
    assert torchrun.ranks_are_gone()


@pytest.mark.parametrize(
    ("how", "stage", "error"),
    [
        ("has-a-bug", "while it was set up", "TypeError: '<' not supported between instances of 'str' and 'int'"),
        (
            "has-a-wrong-parser",
            "before a model was loaded",
            "ValueError: invalid literal for int() with base 10: 'many'",
        ),
    ],
)
def test_the_traceback_of_an_unexpected_error_is_printed_once(tmp_path: Path, how: str, stage: str, error: str) -> None:
    torchrun = Torchrun(tmp_path, how)
    code, output, seconds = torchrun.finish()
    assert code == 1 and seconds < 15
    first = f"swift_megatron_grpo: this run failed {stage}, with an error that may be a bug:\nTraceback (most recent"
    assert output.startswith(first) and output.endswith(f"\n{error}\n"), output
    assert output.count("Traceback") == 1 and "RankFailure" not in output
    assert torchrun.ranks_are_gone()


def test_only_what_the_package_raises_is_shown_without_a_traceback() -> None:
    def error_of(work: Callable[[], object]) -> BaseException:
        with pytest.raises((ValueError, RuntimeError, TypeError)) as raised:
            work()
        return raised.value

    assert is_raised_by_package(error_of(lambda: check_max_turns(0)))
    assert not is_raised_by_package(error_of(lambda: check_max_turns("many")))  # type: ignore[arg-type]
    assert not is_raised_by_package(error_of(lambda: int("many")))


def test_a_file_that_cannot_be_imported_is_refused_with_its_traceback(tmp_path: Path) -> None:
    (plugin := tmp_path / "plugin.py").write_text("rewards = {}\nrewards.apend(1)\n")
    with pytest.raises(ValueError, match="importing it raises AttributeError") as raised:
        import_plugin("external_plugins", str(plugin), lambda file: runpy.run_path(file))
    assert is_caused_by_bug(raised.value) and not is_caused_by_bug(ValueError("--lr 0 must be above 0"))

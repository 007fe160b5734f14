"""Watch the members of a run until it ends, and end all of them together with one line that says why."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from swift_megatron_grpo.launch.member import Member, State
from swift_megatron_grpo.plugin.command_line import seconds_of
from swift_megatron_grpo.plugin.lost_machine import how_to_continue
from swift_megatron_grpo.plugin.torchrun import DEFAULT_GRACE

_LOOK_SECONDS = 0.3
_FOLLOWING_SECONDS = 30.0  # for the ranks of other machines to end as well
_STOP_SECONDS = 30.0  # beyond --stop_grace
_SERVER_SECONDS = 10.0  # for servers to end at SIGTERM
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOPPED = {128 + number for number in _SIGNALS}


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run."""

    code: int
    line: str = ""  # for the user; empty: the members have said all
    may_continue: bool = False  # True if a start from the newest checkpoint may do better


class StopRequest:
    """SIGTERM or Ctrl-C to this process."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.times = 0
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or signal.Signals(number)
        self.times += 1


class Supervision:
    """The members of one start of a run."""

    def __init__(
        self,
        trainers: Sequence[Member],
        servers: Sequence[Member],
        flags: Sequence[str],
        elsewhere: Callable[[], End | None] = lambda: None,
    ) -> None:
        """Watch these. `flags`: of the trainer; `elsewhere`: how members of others have ended the run, if they have."""
        self._elsewhere = elsewhere
        self._trainers, self._servers, self._flags = trainers, servers, list(flags)
        self._grace = seconds_of(self._flags, "stop_grace", DEFAULT_GRACE)
        self._seen: dict[str, State] = {}

    def until_end(self, stop: StopRequest) -> End:
        """Return once the ranks have ended, or cannot; every member has then ended."""
        try:
            end = self._watch(stop)
        finally:
            for trainer in self._trainers:
                trainer.kill()
            self._end_servers()
        return end

    def _watch(self, stop: StopRequest) -> End:
        passed, deadline = 0, float("inf")
        while True:
            if stop.times > passed:
                passed = stop.times
                deadline = min(deadline, time.monotonic() + self._grace + _STOP_SECONDS)
                for trainer in self._trainers:
                    trainer.stop()
            if (end := self._end_of_ranks(stop)) is not None:
                return end
            if (end := self._elsewhere()) is not None:
                return end
            if not passed and (end := self._end_of_servers()) is not None:
                return end
            if time.monotonic() > deadline:
                return End(128 + signal.SIGTERM, f"the ranks did not stop in time (--stop_grace {self._grace:g})")
            time.sleep(_LOOK_SECONDS)

    def _end_of_ranks(self, stop: StopRequest) -> End | None:
        """Return the end of the run once the ranks of a machine have ended. Those that do not say why follow others."""
        states = self._states_of_ranks()
        if not any(map(_has_ended, states.values())):
            return None
        stops = stop.number is not None or any(state.code in _STOPPED for state in states.values())
        limit = time.monotonic() + (self._grace + _STOP_SECONDS if stops else _FOLLOWING_SECONDS)
        while not all(map(_has_ended, states.values())) and time.monotonic() < limit:
            if any(state.said for state in states.values()):
                break
            time.sleep(_LOOK_SECONDS)
            states = self._states_of_ranks()
        codes = {state.code for state in states.values() if state.code is not None}
        if stop.number is not None:
            return End(128 + stop.number)
        if stopped := codes & _STOPPED:
            return End(stopped.pop())
        if all(state.code == 0 for state in states.values()):
            return End(0)
        return self._failure(states)

    def _states_of_ranks(self) -> dict[str, State]:
        return {trainer.name: trainer.state() for trainer in self._trainers}

    def _failure(self, states: dict[str, State]) -> End:
        """Return what ended the run: a lost member, or what a rank's own torchrun has said, before what followed."""
        failed = {name: state for name, state in states.items() if state.code != 0}
        name, state = max(failed.items(), key=lambda item: (bool(item[1].said), item[1].code is not None))
        if state.code is None and not state.said:
            return End(1, f"{name} has not ended {_FOLLOWING_SECONDS:g} s after the other ranks, and was killed")
        if not state.said:
            return End(state.code or 1, f"{name} ended with exit code {state.code}, and says why above")
        return End(
            1,
            f"{name}: {state.said}. All ranks and servers are ended; {how_to_continue(self._flags)}",
            may_continue=True,
        )

    def _end_of_servers(self) -> End | None:
        """Return the end of the run if a server could not start; print a line for one that is started again or lost."""
        for server in self._servers:
            state, before = server.state(), self._seen.get(server.name, State())
            self._seen[server.name] = state
            if state.restarts > before.restarts:
                say(f"{server.name} has ended, and is started again at its address")
            if _has_ended(state) and not _has_ended(before):
                if not state.restarts and not state.is_lost:
                    return End(
                        1, f"{server.name} ended with exit code {state.code} before it was ready, and says why above"
                    )
                say(f"{server.name} is lost, and is not started again; the ranks continue with the other servers")
        return None

    def _end_servers(self) -> None:
        for server in self._servers:
            server.stop()
        limit = time.monotonic() + _SERVER_SECONDS
        while time.monotonic() < limit and not all(_has_ended(server.state()) for server in self._servers):
            time.sleep(_LOOK_SECONDS)
        for server in self._servers:
            server.kill()


def _has_ended(state: State) -> bool:
    return state.code is not None or state.is_lost


def run(start: Callable[[bool], Supervision], max_failures: int, stop: StopRequest) -> End:
    """Start the members, again after a failure if that is allowed, and return how the last start ended."""
    for failures in range(max_failures + 1):
        end = start(failures > 0).until_end(stop)
        if not end.may_continue or stop.times or failures == max_failures:
            break
        say(f"{end.line}. This is failure {failures + 1}; the run is started again (max_failures {max_failures})")
    return end


def say(line: str) -> None:
    print(f"swift_megatron_grpo: {line}", file=sys.stderr, flush=True)

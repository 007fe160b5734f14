"""The loss of a machine, in torchrun's own process: ends the ranks of this machine, with one line that says why.

runtime/machines.py finds the loss. The ranks that wait for the lost machine in a collective do not.
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from swift_megatron_grpo.plugin.command_line import parse_flag, seconds_of
from swift_megatron_grpo.runtime.machines import GONE_SECONDS, Machines, connected
from swift_megatron_grpo.runtime.refusals import lost_connection

DEFAULT_TIMEOUT = 300.0  # of --node_timeout
_FOLLOWING_SECONDS = 15.0  # for the ranks of this machine to report what has ended another, and to end
_DISK_SECONDS = 10.0  # for a file system, which may have been on the lost machine


def other_machines(environments: Mapping[int, Mapping[str, str]]) -> Machines | None:
    """Return the other machines of a run, by the environments of this one's ranks; None: there is no other.

    A torchrun that restarts its ranks (--max_restarts) is left to do so.
    """
    first = next(iter(environments.values()))
    count = int(first.get("GROUP_WORLD_SIZE", "1"))
    if count == 1 or first.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        return None
    ranks = sorted(int(environment["RANK"]) for environment in environments.values())
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    connect = partial(connected, first["MASTER_ADDR"], int(first["MASTER_PORT"]))
    return Machines(int(first["GROUP_RANK"]), count, named, connect)


class LossOfMachine:
    """Ends the ranks on this machine when another machine is lost or has ended."""

    def __init__(
        self,
        machines: Machines | None,
        args: list[str],
        refusals: Path,
        end_ranks: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._machines, self._args, self._refusals, self._end_ranks = machines, args, refusals, end_ranks
        self._print = say
        self._timeout = seconds_of(args, "node_timeout", DEFAULT_TIMEOUT)
        self._first: dict[str, float] = {}  # when something was seen first

    def ends_run(self) -> bool:
        """Return True once another machine is lost: the ranks of this one are killed, and the last line is printed."""
        if self._machines is None:
            return False
        self._machines.look()
        for line in self._machines.news(self._timeout):
            self._print(line)
        broken, ended = lost_connection(self._refusals), self._machines.ended()
        after = self._timeout if broken is None else GONE_SECONDS
        lost = ended if broken is not None or self._waited("ended", ended) else None
        lost = lost or (self._machines.lost(after) if after else None)
        if lost is not None:
            return self._end(lost, f"{lost}. The ranks of this machine are ended; {how_to_continue(self._args)}")
        if self._waited("broken", broken):
            reason = "a rank has lost a connection, and no machine is lost"
            return self._end(reason, f"{reason}:\n{broken}")
        return False

    def tell_others(self, reason: str) -> None:
        """Tell the other machines that this one ends; `reason`: what their ranks cannot know, or empty."""
        if self._machines is None:
            return
        if reason:
            self._end_ranks()
        self._machines.end(reason)

    def _end(self, reason: str, line: str) -> bool:
        assert self._machines is not None
        self._end_ranks()
        self._machines.end(reason)  # torch may print a warning about a store that does not answer
        self._print(line)
        return True

    def _waited(self, what: str, seen: str | None) -> bool:
        """Return True if something was seen a while ago."""
        now = time.monotonic()
        return seen is not None and now - self._first.setdefault(what, now) > _FOLLOWING_SECONDS


def how_to_continue(args: list[str]) -> str:
    """Return which checkpoint `--resume auto` finds, and the flags that continue from it."""
    output_dir = parse_flag(args, "output_dir")
    if output_dir is None:
        return "without --output_dir, --resume auto finds no checkpoint"
    found: list[str] = []

    def find() -> None:
        from swift_megatron_grpo.output.checkpoints.newest import find_newest
        from swift_megatron_grpo.output.checkpoints.sources import BadCheckpoint

        try:
            newest, _ = find_newest(Path(output_dir).expanduser().absolute())
        except (OSError, BadCheckpoint) as error:
            found.append(f"no checkpoint can be continued from: {error}")
            return
        if newest is None:
            found.append(f"{output_dir} has no whole checkpoint to continue from, so the same command begins again")
            return
        again = "again" if parse_flag(args, "resume") == "auto" else "with --resume auto"
        found.append(
            f"the newest whole checkpoint is {newest.folder}. To continue, on these or other machines, use the same "
            f"command {again}"
        )

    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    thread.join(_DISK_SECONDS)
    return found[0] if found else f"{output_dir} does not answer. To continue, use the same command with --resume auto"

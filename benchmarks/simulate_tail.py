"""Simulate the tails of rollouts on one server: slots that are idle while the last completions of a rollout run.

    python -m benchmarks.simulate_tail

Which rollout may start is decided by the package's own rule. Lengths follow a log-normal distribution. The time of a
decoding step grows with the running completions, or is constant; prompts and grading take no time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.harness.lengths import Lengths
from benchmarks.harness.markdown import lines_of
from swift_megatron_grpo.loop.run_ahead import RunAhead
from swift_megatron_grpo.loop.spare_groups import SpareGroups

LENGTHS = "lognormal:700:0.9:4096"
TRAINING = (0.25, 0.5, 1.0)  # seconds of training, relative to one rollout alone


@dataclass(frozen=True)
class Decode:
    """Seconds of one decoding step, which appends a token to each running completion."""

    floor: float
    each: float  # for every completion that runs

    def step(self, running: int) -> float:
        return self.floor + self.each * running


GROWING, FLAT = Decode(0.004, 0.00003), Decode(0.0044, 0.0)  # the second one: docs/performance-log.md


@dataclass(frozen=True)
class Case:
    max_staleness: int = 1
    in_flight: bool = False  # --in_flight_weight_updates: the server need not be idle to be sent weights
    groups_ahead: int = 0  # of the next rollout, started when no completion waits; one rollout staler than the rule
    uniform: float = 0.0  # share of groups that --dynamic_sample replaces
    most_draws: int = 3  # --max_resample_times
    spare: int = 0  # groups that start with a rollout (--spare_groups)
    draws_alone: bool = True  # they are generated before the next rollout starts
    train_seconds: float = 0.0  # of one step
    sync_seconds: float = 1.0
    rollouts: int = 25
    steps: int = 1  # of training on a rollout (--steps_per_generation)
    prompts: int = 128  # of a step
    completions: int = 8  # of a prompt
    slots: int = 256
    lengths: str = LENGTHS
    decode: Decode = GROWING


@dataclass(frozen=True)
class Result:
    seconds: float  # of a step of training, on average
    busy: float  # share of the slots
    staleness: float  # mean over completions, in steps; that of their first tokens
    most_stale: int
    within_bound: set[int]  # rollouts in whose tails the next one could have started, by the rule


class Server:
    """Completions on one server, in the order in which they were started."""

    def __init__(self, slots: int, decode: Decode) -> None:
        self.slots, self.decode = slots, decode
        self.seconds = self.used = 0.0  # since the start; seconds of all slots that were in use
        self.waiting: deque[tuple[int, int]] = deque()  # rollout and tokens
        self.missing: Counter[int] = Counter()  # completions, by rollout
        self._steps = 0.0
        self._running: list[tuple[float, int]] = []  # a heap: the step at which each ends, and its rollout

    @property
    def is_idle(self) -> bool:
        return not self._running

    def start(self, rollout: int, lengths: Sequence[int], first: bool = False) -> None:
        """Queue completions, behind all others unless `first`."""
        self.missing[rollout] += len(lengths)
        if first:
            self.waiting.extendleft((rollout, tokens) for tokens in reversed(lengths))
        else:
            self.waiting.extend((rollout, tokens) for tokens in lengths)
        self._fill()

    def finish_next(self) -> None:
        """Run until a completion ends."""
        self._run(self._running[0][0] - self._steps)
        _, rollout = heapq.heappop(self._running)
        self.missing[rollout] -= 1
        self._fill()

    def run(self, seconds: float) -> None:
        """Run for some time, whether or not there is something to do."""
        end = self.seconds + seconds
        while self._running:
            steps = self._running[0][0] - self._steps
            step = self.decode.step(len(self._running))
            if self.seconds + steps * step > end:
                self._run((end - self.seconds) / step)
                break
            self.finish_next()
        self.seconds = end

    def pause(self, seconds: float) -> None:
        self.seconds += seconds

    def _run(self, steps: float) -> None:
        seconds = steps * self.decode.step(len(self._running))
        self._steps += steps
        self.seconds += seconds
        self.used += seconds * len(self._running)

    def _fill(self) -> None:
        while self.waiting and len(self._running) < self.slots:
            rollout, tokens = self.waiting.popleft()
            heapq.heappush(self._running, (self._steps + tokens, rollout))


class Run:
    """One simulated run. A version of the weights is a number of trained rollouts."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, self.server = case, Server(case.slots, case.decode)
        self._rule = RunAhead(case.max_staleness, 1, 0, 0, case.rollouts)
        self._rng = random.Random(seed)
        self._engine_version = 0
        self._started = 0  # rollouts
        self._ahead = 0  # groups of the next rollout that run already
        self._staleness: Counter[int] = Counter()  # completions
        self._within_bound: set[int] = set()

    def result(self) -> Result:
        for rollout in range(self.case.rollouts):
            self._take(rollout)
            self.server.run(self.case.train_seconds * self.case.steps)
        mean = sum(stale * number for stale, number in self._staleness.items()) / sum(self._staleness.values())
        return Result(
            seconds=self.server.seconds / self.case.rollouts / self.case.steps,
            busy=self.server.used / self.server.seconds / self.case.slots,
            staleness=mean * self.case.steps + (self.case.steps - 1) / 2,
            most_stale=max(self._staleness) * self.case.steps + self.case.steps - 1,
            within_bound=self._within_bound,
        )

    def _take(self, rollout: int) -> None:
        if self._started == rollout:
            self._start_rest(rollout)
        if self.case.in_flight:
            self._sync_if_possible(rollout)
            self._start_what_may(rollout)
        self._wait_for(rollout)
        if self.case.draws_alone:
            self._replace_groups(rollout)
        self._start_what_may(rollout)
        if not self.case.draws_alone:
            self._replace_groups(rollout)

    def _start_what_may(self, training: int) -> None:
        while self._rule.in_window(self._started, training):
            while self._ahead and not self.server.is_idle:  # the other groups wait for newer weights
                self.server.finish_next()
            if not self._rule.may_start(self._started, self._engine_version, training, self._takes_weights):
                break
            self._start_rest(training)

    def _wait_for(self, rollout: int) -> None:
        while self.server.missing[rollout]:
            if not self.server.waiting and self._started < self.case.rollouts:
                if self._rule.may_start(self._started, self._engine_version, rollout, idle=False):
                    self._within_bound.add(rollout)
                self._start_ahead()
            self.server.finish_next()

    def _start_ahead(self) -> None:
        stale = self._rule.staleness(self._started, self._engine_version)
        if self.case.groups_ahead and not self._ahead and stale <= self.case.max_staleness + 1:
            self._ahead = self.case.groups_ahead
            self._start(self._started, self._ahead)

    def _start_rest(self, newest: int) -> None:
        """Start what is left of the next rollout, with the newest weights if the server takes them."""
        self._sync_if_possible(newest)
        self._start(self._started, self.case.prompts * self.case.steps - self._ahead + self.case.spare)
        self._started, self._ahead = self._started + 1, 0

    @property
    def _takes_weights(self) -> bool:
        return self.server.is_idle or self.case.in_flight

    def _sync_if_possible(self, newest: int) -> None:
        if self._takes_weights and self._engine_version != newest:
            self.server.pause(self.case.sync_seconds)
            self._engine_version = newest

    def _start(self, rollout: int, groups: int, first: bool = False) -> None:
        count = groups * self.case.completions
        self._staleness[self._rule.staleness(rollout, self._engine_version)] += count
        self.server.start(rollout, Lengths(self.case.lengths).draw(count, self._rng), first)

    def _replace_groups(self, rollout: int) -> None:
        """Draw groups in place of uniform ones, of which each draw has the same share again."""
        groups, spare = self.case.prompts * self.case.steps, self.case.spare
        for _ in range(self.case.most_draws):
            if not (groups := round(groups * self.case.uniform)):
                return
            spare, missing = max(spare - groups, 0), max(groups - spare, 0)
            if missing:
                self._sync_if_possible(rollout)
                self._start(rollout, missing, first=True)
                self._wait_for(rollout)


@dataclass(frozen=True)
class Tail:
    """One rollout alone."""

    seconds: float
    tail: float  # seconds after its last completion has started
    busy: float  # share of the slots in that time


@cache
def tail_of(case: Case) -> Tail:
    server = Server(case.slots, case.decode)
    server.start(0, Lengths(case.lengths).draw(case.prompts * case.completions, random.Random(0)))
    while server.waiting:
        server.finish_next()
    began, used = server.seconds, server.used
    while not server.is_idle:
        server.finish_next()
    seconds = server.seconds - began
    return Tail(server.seconds, seconds, (server.used - used) / seconds / case.slots)


def table(without: Collection[str] = ()) -> str:
    """Return the seconds of a step as Markdown, for both models of a server and three times of training.

    `without`: settings that are left out.
    """
    cases = {f"0, `--steps_per_generation {steps}`": Case(max_staleness=0, steps=steps) for steps in (1, 2, 4)}
    cases |= {f"`--max_staleness {number}`": Case(max_staleness=number) for number in (1, 2, 3)}
    cases |= {f"{number}, in flight": Case(max_staleness=number, in_flight=True) for number in (1, 2, 3)}
    for groups in (8, 32):
        cases[f"1, and {groups} groups of the next rollout in each tail"] = Case(groups_ahead=groups)
    cases["1, `--dynamic_sample`: a quarter of the groups is replaced"] = Case(uniform=0.25)
    spare = SpareGroups(None, 128, 3 * 128)
    spare.remember(4, 3)
    cases["the same, with `--spare_groups auto`"] = Case(uniform=0.25, spare=spare.wanted())
    cases["1, a quarter of the groups is replaced next to the following rollout"] = Case(
        uniform=0.25, draws_alone=False
    )
    heads = ["settings", "staleness: mean, maximum"]
    heads += [f"{name}, {share:g}" for name in ("growing", "flat") for share in TRAINING]
    return lines_of([heads, *([name, *cells(case)] for name, case in cases.items() if name not in without)])


@cache
def cells(case: Case) -> tuple[str, ...]:
    """Return staleness, and the seconds of a step for each model of a server and time of training."""
    results = [
        Run(replace(case, decode=decode, train_seconds=share * tail_of(Case(decode=decode)).seconds)).result()
        for decode in (GROWING, FLAT)
        for share in TRAINING
    ]
    staleness = f"{results[0].staleness:.2f}, {results[0].most_stale}"
    return staleness, *(f"{result.seconds:.1f}" for result in results)


def main() -> None:
    for name, decode in {"growing": GROWING, "flat": FLAT}.items():
        one = tail_of(Case(decode=decode))
        tail = f"{one.tail:.1f} s in the tail with {one.busy:.0%} of the slots busy"
        print(f"{name}: {one.seconds:.1f} s, of which {tail}")
    print(table())


if __name__ == "__main__":
    main()

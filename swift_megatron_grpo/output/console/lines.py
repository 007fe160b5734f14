"""Lines that a run prints, in pure Python: a step in aligned columns, a completion, the pace, the status line."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Metrics = Mapping[str, float]

HEADER_EVERY = 20  # lines
_BAR = 20  # characters for the time of a step
_STATUS_BAR = 24  # characters for the steps that are done
_WINDOW = 20  # rollouts over which the pace is measured
_PHASE = "time/"
_LETTERS = {
    "train": "T", "generation": "G", "old_logprobs": "O", "ref_logprobs": "R", "teacher_logprobs": "H",
    "weight_sync": "W", "sync_check": "C", "grading": "F", "phase_switch": "P",
    "entropies": "E", "kl_in_reward": "K", "dump": "D", "replay": "D",
    "router_agreement": "A", "log_ratios": "M",
}  # fmt: skip
_OTHER = "."  # checkpoints, evaluation, logs


@dataclass(frozen=True)
class Column:
    title: str
    width: int
    text: Callable[[Metrics], str]


def number(name: str) -> Callable[[Metrics], str]:
    return lambda metrics: "-" if name not in metrics else compact(metrics[name])


def percent(name: str) -> Callable[[Metrics], str]:
    return lambda metrics: "-" if name not in metrics else f"{100 * metrics[name]:.0f}%"


COLUMNS = (
    Column("reward", 9, number("reward")),
    Column("length", 8, number("completions/mean_length")),
    Column("cut", 5, percent("completions/clipped_ratio")),
    Column("KL", 9, number("kl")),
    Column("loss", 10, number("loss")),
    Column("grad", 8, number("grad_norm")),
    Column("tok/s", 8, number("speed/tokens_per_second")),
    Column("MFU", 5, percent("speed/mfu")),
)


def compact(value: float) -> str:
    """Return a number in at most nine characters."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.1e}"
    return f"{value:.{4 if size < 10 else 2 if size < 1000 else 0}f}"


def duration(seconds: float | None) -> str:
    """Return a time in at most seven characters."""
    if seconds is None:
        return "-"
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 100 else f"{hours // 24}d{hours % 24:02d}h"


def header(steps: str) -> str:
    """Return the titles over the columns. `steps`: the widest text of the first column."""
    titles = "".join(column.title.rjust(column.width) for column in COLUMNS)
    return f"{'step':>{len(steps)}}{'rollout':>9}{titles}{'time':>9}{'left':>9}  phases"


def legend(phases: Sequence[str]) -> str:
    return ", ".join(f"{_LETTERS.get(phase, '?')} {phase.replace('_', ' ')}" for phase in phases)


def step_line(
    steps: str, rollout: int, metrics: Metrics, seconds: float | None, remaining: float | None, width: int
) -> str:
    """Return the line of a step. `steps`: "7/30"; `width`: of the first column; `seconds`: the time of the step."""
    values = "".join(column.text(metrics).rjust(column.width) for column in COLUMNS)
    times = f"{duration(seconds):>9}{duration(remaining):>9}"
    return f"{steps:>{width}}{rollout:>9}{values}{times}  {phase_bar(metrics, seconds)}".rstrip()


def phases_of(metrics: Metrics) -> dict[str, float]:
    phases = {name.removeprefix(_PHASE): value for name, value in metrics.items() if name.startswith(_PHASE)}
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def phase_bar(metrics: Metrics, seconds: float | None) -> str:
    """Return a bar of letters, each a twentieth of the step; dots are the rest of it, outside of all phases."""
    phases = phases_of(metrics)
    total = max(seconds or 0.0, sum(phases.values()))
    if not phases or total <= 0:
        return ""
    bar, until = "", 0.0
    for phase, value in phases.items():
        until += value
        bar += _LETTERS.get(phase, "?") * (round(_BAR * until / total) - len(bar))
    return bar.ljust(_BAR, _OTHER)


def evaluation_line(step: int, metrics: Metrics) -> str:
    shown = {"reward": "eval_reward", "length": "eval_completions/mean_length", "cut": "eval_completions/clipped_ratio"}
    values = [f"{title} {compact(metrics[name])}" for title, name in shown.items() if name in metrics]
    return f"evaluation at step {step}: {', '.join(values) or 'no metrics'}"


def completion_line(rollout: int, reward: float | None, text: str, width: int = 160) -> str:
    """Return a completion in one line. Control characters are escaped, because a model wrote the text."""
    characters = text[: width + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in characters)
    if len(shown) > width:
        shown = shown[:width] + "…"
    return f"  a completion of rollout {rollout}, reward {'-' if reward is None else compact(reward)}: {shown}"


class Pace:
    """The mean time of a step, over the newest steps and without the first rollout.

    That one includes what a run does once: it captures graphs, compiles kernels and verifies all weights.
    """

    def __init__(self, step: int, total: int, now: float, steps_per_rollout: int = 1) -> None:
        self._total, self._start, self._step = total, step, step
        self._last = now
        self._per_rollout = steps_per_rollout
        # Whole rollouts: the first step of each also generates.
        self._times: deque[float] = deque(maxlen=_WINDOW * steps_per_rollout)

    def finish(self, step: int, now: float) -> None:
        """Note the end of a step, or of several at once."""
        count = step - self._step
        if count <= 0:
            return
        each, self._last = (now - self._last) / count, now
        for done in range(self._step + 1, step + 1):
            if done > self._start + self._per_rollout:
                self._times.append(each)
        self._step = step

    @property
    def remaining(self) -> float | None:
        """The seconds of the remaining steps; None until the steps of the second rollout have ended."""
        if len(self._times) < self._per_rollout:
            return None
        return sum(self._times) / len(self._times) * (self._total - self._step)


def status(step: int, total: int, what: str, elapsed: float, remaining: float | None, width: int) -> str:
    full = round(_STATUS_BAR * step / total) if total else 0
    bar = "█" * full + "░" * (_STATUS_BAR - full)
    left = "" if remaining is None else f" · {duration(remaining)} left"
    return f"{bar} {step}/{total} · {what} · {duration(elapsed)}{left}"[: max(width - 1, 20)]

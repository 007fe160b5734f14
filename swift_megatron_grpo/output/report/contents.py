"""The content of the page, for one run or several, as one JSON value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.output.report.completions import Completions, read_completions
from swift_megatron_grpo.output.report.histograms import of_completions
from swift_megatron_grpo.output.report.run_files import RunFiles, Table, read_run, thinned
from swift_megatron_grpo.output.report.simulated_drafts import saved_steps

MOST_POINTS = 1000  # per curve
MOST_BYTES = 6 * 2**20  # of completions.jsonl, for all runs of a page
PHASE = "time/"
# Settings that differ between any two runs, or that say nothing about them.
_NOISE = {"rank", "local_rank", "output_dir", "tensorboard_dir", "ckpt_dir", "swanlab_exp_name", "wandb_exp_name"}
_NO_COMPLETIONS = "completions are not shown: the run did not write completions.jsonl; use --log_completions true"


@dataclass(frozen=True)
class LoadedRun:
    """The files of one run, and its name on the page."""

    name: str
    files: RunFiles
    completions: Completions | None


def load(folders: Sequence[Path], most_bytes: int = MOST_BYTES) -> list[LoadedRun]:
    share = most_bytes // len(folders)
    named = zip(names_of(folders), folders, strict=True)
    return [LoadedRun(name, read_run(folder), read_completions(folder, share)) for name, folder in named]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ; equal paths are numbered."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def contents(runs: Sequence[LoadedRun], written: str) -> dict[str, Any]:
    """Return the JSON of the page. `written`: the time, for its header."""
    return {
        "written": written,
        "runs": [_run(run) for run in runs],
        "differing": differing([run.files.settings for run in runs]),
    }


def _run(run: LoadedRun) -> dict[str, Any]:
    files = run.files
    training, steps_per_point = thinned(files.training, MOST_POINTS)
    evaluation, _ = thinned(files.evaluation, MOST_POINTS)
    last = files.training.steps[-1] if files.training.steps else 0
    return {
        "name": run.name,
        "folder": str(files.folder),
        "step": last,
        **{name: getattr(files, name) for name in ("total_steps", "ended", "elapsed", "notes")},
        "remaining": None if files.ended else remaining_seconds(files.training, files.total_steps),
        "steps_per_point": steps_per_point,
        "training": _columns(training),
        "evaluation": _columns(evaluation),
        "phases": [name.removeprefix(PHASE) for name in files.training.values if name.startswith(PHASE)],
        "facts": [*facts(files.settings), *simulated(files.folder)],
        "settings": shown_settings(files.settings),
        "reasons": reasons(run),
        "histograms": None if run.completions is None else of_completions(run.completions),
        "completions": None if run.completions is None else _completions(run.completions),
    }


def _columns(table: Table) -> dict[str, Any]:
    rounded = {name: [_rounded(value) for value in column] for name, column in table.values.items()}
    return {"steps": table.steps, "values": rounded}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def remaining_seconds(training: Table, total_steps: int | None, newest: int = 20) -> float | None:
    """Return the remaining steps times the mean time of the newest; step 1, which also starts up, is left out."""
    columns = [column for name, column in training.values.items() if name.startswith(PHASE)]
    if not columns or total_steps is None:
        return None
    sums = [sum(column[i] or 0.0 for column in columns) for i in range(len(training.steps))]
    recent = sums[1:][-newest:] or sums
    return sum(recent) / len(recent) * (total_steps - training.steps[-1])


def facts(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a reader asks first about a run's settings."""
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "data")
    given = {f"{kind[0].upper()}P": settings.get(f"{kind}_parallel_size") for kind in kinds}
    sizes = [f"{short} {size}" for short, size in given.items() if isinstance(size, int) and size > 1]
    named = {
        "model": settings.get("model"), "tuning": settings.get("tuner_type"),
        "ranks": settings.get("global_world_size"), "layout": ", ".join(sizes), "vLLM": settings.get("vllm_mode"),
        "loss": settings.get("loss_type"), "completions per step": settings.get("global_batch_size"),
        "per prompt": settings.get("num_generations"), "learning rate": settings.get("lr"),
        "beta": settings.get("beta"),
    }  # fmt: skip
    return [(label, str(value)) for label, value in named.items() if value not in (None, "")]


def simulated(folder: Path) -> list[tuple[str, str]]:
    """Return what drafts would have saved, if `simulate-drafts` has counted it in this run."""
    saved = saved_steps(folder)
    return [] if saved is None else [("decode steps that drafts would save", saved)]


def shown_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in sorted(settings.items())}


def _text(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 300 else text[:300] + " …"


def differing(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row of texts for every setting that differs between runs: its name, then its value in each run."""
    shown = [shown_settings(one) for one in settings]
    names = sorted(set().union(*shown) - _NOISE) if len(shown) > 1 else []
    rows = [[name, *(one.get(name, "") for one in shown)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def reasons(run: LoadedRun) -> dict[str, str]:
    """Return why a part of the page is left out, in one line each."""
    values, settings = run.files.training.values, run.files.settings
    missing: dict[str, str] = {}
    if not run.files.training.steps:
        missing["curves"] = "no step has been logged yet"
        return missing | ({} if run.completions else {"completions": _NO_COMPLETIONS})
    if not any(name.startswith(PHASE) for name in values):
        missing["phases"] = "logging.jsonl has no times of phases (time/...)"
    if "rollout/staleness" not in values:
        missing["staleness"] = (
            "no staleness is logged: without --async_generate every completion comes from the newest weights"
        )
    if "sync_check/mean_diff" not in values:
        off = "--sync_check off" if settings.get("sync_check") == "off" else "no sync_check metrics in logging.jsonl"
        missing["sync"] = f"weight syncs were not verified: {off}"
    memory = (column for name, column in values.items() if name == "memory(GiB)" or name.startswith("memory/"))
    if not any(map(any, memory)):
        missing["memory"] = "no GPU memory is logged: the run had no GPU"
    if run.completions is None:
        missing["completions"] = _NO_COMPLETIONS
    return missing


def _completions(completions: Completions) -> dict[str, Any]:
    """Return the completions; every prompt is held once."""
    prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt for row in completions.rows))}
    return {
        "functions": completions.functions,
        "left_out": completions.left_out,
        "prompts": list(prompts),
        "rows": [
            {
                "rollout": row.rollout,
                "version": row.weights_version,
                "prompt": prompts[row.prompt],
                "text": row.text,
                "rewards": [_rounded(reward) for reward in row.rewards],
                "total": _rounded(row.total),
                "advantage": _rounded(row.advantage),
                "tokens": row.tokens,
                "truncated": row.truncated,
            }
            for row in completions.rows
        ],
    }

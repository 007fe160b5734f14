"""Find the checkpoint that a run continues from (--resume): the newest whole one of a folder, or a given one."""

import re
from dataclasses import dataclass
from pathlib import Path

from swift_megatron_grpo.output.checkpoints import sources
from swift_megatron_grpo.output.checkpoints.manifest import MANIFEST, BadManifest, has_manifest, read_manifest
from swift_megatron_grpo.output.disk.files import read_regular

FLAG = "resume"  # in errors about the checkpoint
AFTER_VARIABLE = "SWIFT_MEGATRON_GRPO_RESUME_AFTER"  # set by launch/: the time of the last save by earlier runs
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_VERSION = re.compile(r"v\d+-.+")  # the folder of one run below --output_dir (--add_version)
_SHOWN = 3  # checkpoints that an error names


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    step: int
    has_adapter: bool  # True: it holds an adapter, not the model
    has_draft_head: bool = False  # True: it holds a layer of multi-token prediction that was trained

    @property
    def run_folder(self) -> Path:
        return self.folder.parent

    def settings(self) -> dict[str, str | bool]:
        """Return the values of the flags that load it, by their names."""
        return {"finetune": False, "mcore_adapter" if self.has_adapter else "mcore_model": str(self.folder)}


def find_newest(
    output_dir: Path, loads_optimizer: bool = True, after: float = 0.0
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint of an output folder and its runs, and why newer ones are skipped.

    Files up to 1 MiB are verified, and the sizes of all others. Raises BadCheckpoint if there are only damaged ones:
    a run that starts again would overwrite them. Those that were not saved `after` this are left out.
    """
    skipped, damaged = list[str](), list[str]()
    found = sorted(
        checkpoints_of(output_dir),
        key=lambda folder: (saved_at(folder), sources.step_of(folder), str(folder)),
        reverse=True,
    )
    for place, folder in enumerate(found):
        if saved_at(folder) <= after:
            skipped.append(f"{folder} and what is older: they are of earlier runs")
            break
        if not has_manifest(folder):
            skipped.append(f"{folder}: it has no {MANIFEST}, which is written last, so its save was interrupted")
            continue
        reason = _why_unusable(folder, loads_optimizer)
        if reason is None:
            return open_checkpoint(folder), skipped + _passed_over(folder, found[place + 1 :])
        damaged.append(f"{folder}: {reason}")
        skipped.append(damaged[-1])
    if damaged:
        more = f"; and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        raise sources.BadCheckpoint(
            f"--resume auto: no checkpoint in {output_dir} can be continued from: {'; '.join(damaged[:_SHOWN])}{more}; "
            "restore one of them, use another --output_dir, or use --resume never to start from step 1"
        )
    return None, skipped


def _passed_over(newest: Path, older: list[Path]) -> list[str]:
    """Return why higher steps in the folder of the newest checkpoint are skipped: a run was begun again there."""
    return [
        f"{folder}: it was saved before {newest.name}, by the times in their manifests; --resume {folder} continues "
        "from it"
        for folder in older
        if folder.parent == newest.parent and sources.step_of(folder) > sources.step_of(newest)
    ]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder; raise BadCheckpoint if it holds none in Megatron's format."""
    try:
        step = int(read_regular(folder / sources.TRACKER))
        saved = sources.saved_arguments(folder)
        adapter, draft_head = saved.get("tuner_type", "full") != "full", bool(saved.get("mtp_num_layers"))
    except (OSError, ValueError) as error:
        raise sources.BadCheckpoint(
            f"--resume {folder}: {error}; use --resume auto, or a folder checkpoint-N that a run has saved, with the "
            "optimizer's state (--no_save_optim false)"
        ) from None
    return Checkpoint(folder.resolve() if folder.is_symlink() else folder.absolute(), step, adapter, draft_head)


def _why_unusable(folder: Path, loads_optimizer: bool) -> str | None:
    """Return why a run cannot continue from a checkpoint with a manifest, as far as it shows in no time."""
    faults = sources.quick_faults(sources.Source(FLAG, folder, megatron=True))
    if faults:
        return "; ".join(faults[:_SHOWN])
    if not (folder / sources.TRACKER).is_file():
        return "it has no files in Megatron's format"
    if loads_optimizer and sources.saved_arguments(folder).get("no_save_optim"):
        return "it was saved with --no_save_optim true, so it has no optimizer state to continue with"
    return None


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the checkpoints of an output folder and of its runs; copies with merged adapters are left out."""
    if not output_dir.is_dir():
        return []
    runs = [output_dir, *(path for path in _folders_in(output_dir) if _VERSION.fullmatch(path.name))]
    return [path for run in runs for path in _folders_in(run) if _CHECKPOINT.fullmatch(path.name)]


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder; a link may lead to those of another run."""
    return [path for path in folder.glob("*") if path.is_dir() and not path.is_symlink()]


def last_save(run_folder: Path) -> float:
    """Return when a checkpoint was last saved in the output folder of a run, by any run; 0.0: never."""
    output_dir = run_folder.parent if _VERSION.fullmatch(run_folder.name) else run_folder
    return max(map(saved_at, filter(has_manifest, checkpoints_of(output_dir))), default=0.0)


def saved_at(folder: Path) -> float:
    """Return when a checkpoint was saved; a copy keeps this time, but not the times of its files."""
    try:
        return read_manifest(folder).saved_at
    except BadManifest:  # incomplete or damaged
        path = folder / MANIFEST
        return (path if path.is_file() else folder).stat().st_mtime

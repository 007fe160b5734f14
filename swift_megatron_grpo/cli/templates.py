"""List the template scripts of this package, or copy them into a folder.

swift-megatron-grpo templates           prints their names, and what each is for
swift-megatron-grpo templates FOLDER    copies them, with the reward and environment files
"""

import argparse
import shutil
from itertools import takewhile
from pathlib import Path

from swift_megatron_grpo.cli.command_line import FINE, Refused

_PACKAGE = Path(__file__).parents[1]
_LOCATIONS = (_PACKAGE / "templates", _PACKAGE.parent / "templates")  # of an installed wheel; of a clone


def templates_folder() -> Path:
    for folder in _LOCATIONS:
        if any(folder.glob("*.sh")):
            return folder
    raise Refused(f"no templates in {' or '.join(map(str, _LOCATIONS))}; reinstall swift-megatron-grpo")


def template_files(folder: Path) -> list[Path]:
    """Return the paths of all template files relative to `folder`."""
    files = [*folder.glob("*.sh"), *folder.glob("plugins/*.py")]
    return sorted(file.relative_to(folder) for file in files)


def purpose(script: Path) -> str:
    """Return the first sentence of the comment at the top of a template."""
    comment = takewhile(lambda line: line.startswith("# "), script.read_text().splitlines()[1:])
    return " ".join(line.removeprefix("# ") for line in comment).split(". ")[0].rstrip(".")


def copy_templates(source: Path, target: Path) -> list[Path]:
    """Copy every template into `target` and return the new files. No existing file is overwritten."""
    files = template_files(source)
    existing = [target / file for file in files if (target / file).exists()]
    if existing:
        raise Refused(f"{existing[0]} exists; name another folder, or remove it first")
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, target / file)  # keeps the permission to execute
    return [target / file for file in files]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where to copy them")


def run(options: argparse.Namespace) -> int:
    target: Path | None = options.folder
    source = templates_folder()
    if target is not None:
        print(*copy_templates(source, target), sep="\n")
        return FINE
    scripts = [file for file in template_files(source) if file.suffix == ".sh"]
    width = max(len(str(script)) for script in scripts)
    for script in scripts:
        print(f"{script!s:{width}}  {purpose(source / script)}")
    return FINE

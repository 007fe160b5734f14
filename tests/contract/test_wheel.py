"""The wheel contains everything that README.md tells a user of `pip install` to run.

It is built from a copy of the sources and installed into a separate virtual environment, which can import the packages
of this one but not the clone: every command runs in a folder outside the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.main import COMMANDS
from tests.paths import REPOSITORY

SOURCES = ("swift_megatron_grpo", "templates", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
TEMPLATES = sorted(
    str(file.relative_to(REPOSITORY / "templates"))
    for pattern in ("*.sh", "plugins/*.py")
    for file in (REPOSITORY / "templates").glob(pattern)
)


def run(*command: str | Path, cwd: Path) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy, because setuptools writes into the folder and would include files of an earlier build.
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, copy / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", copy / "dist", copy, cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a virtual environment and return its Python."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Python does not read path files of folders that are added by a path file, so the clone's editable installation is
    # not importable.
    (site_packages / "other_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def command_of(installed: Path) -> Path:
    """Return the console script next to the Python that the wheel was installed for."""
    return installed.with_name("swift-megatron-grpo")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return tmp_path


def test_the_wheel_contains_only_the_package_with_types_and_templates(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "swift_megatron_grpo/py.typed" in names
    shipped = [name.removeprefix("swift_megatron_grpo/templates/") for name in names if "/templates/" in name]
    assert sorted(shipped) == TEMPLATES
    tops = {name.split("/")[0] for name in names}
    assert tops == {"swift_megatron_grpo", next(top for top in tops if top.endswith(".dist-info"))}
    modules = {name for name in names if name.startswith("swift_megatron_grpo/") and "/templates/" not in name}
    package = REPOSITORY / "swift_megatron_grpo"
    sources = [*package.rglob("*.py"), *(package / "output" / "report" / "assets").iterdir(), package / "py.typed"]
    assert modules == {str(file.relative_to(REPOSITORY)) for file in sources}


def test_a_report_is_written_from_the_wheel(installed: Path, outside: Path) -> None:
    (outside / "logging.jsonl").write_text('{"reward": 0.5, "iteration": "1/2"}\n')
    run(command_of(installed), "report", outside, cwd=outside)
    assert '"reward"' in (outside / "report.html").read_text()


def test_torch_finds_the_entry_point_of_the_wheel(installed: Path, outside: Path) -> None:
    code = """
import swift_megatron_grpo
from importlib.metadata import entry_points
(entry,) = (e for e in entry_points(group="torch.backends") if e.value.startswith("swift_megatron_grpo"))
assert callable(entry.load())
print(swift_megatron_grpo.__file__)
"""
    loaded = Path(run(installed, "-c", code, cwd=outside).strip())
    assert loaded.is_relative_to(installed.parents[1])


def test_every_subcommand_starts_from_the_wheel(installed: Path, outside: Path) -> None:
    for name in COMMANDS:
        assert f"swift-megatron-grpo {name} [-h]" in run(command_of(installed), name, "--help", cwd=outside)


def test_templates_are_listed_and_copied_from_the_wheel(installed: Path, outside: Path) -> None:
    listed = run(command_of(installed), "templates", cwd=outside).splitlines()
    assert [line.split()[0] for line in listed] == [name for name in TEMPLATES if name.endswith(".sh")]
    run(command_of(installed), "templates", "scripts", cwd=outside)
    for name in TEMPLATES:
        copy, original = outside / "scripts" / name, REPOSITORY / "templates" / name
        assert copy.read_bytes() == original.read_bytes()
        assert os.access(copy, os.X_OK) == os.access(original, os.X_OK)

"""The Dockerfiles run the scripts and the locks that the tests run; no image is built, which needs a network."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.paths import REPOSITORY

FILES = ("cpu", "gpu")


def instructions(name: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with continued lines joined and comments left out."""
    text = (REPOSITORY / "docker" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def arguments(name: str, instruction: str) -> list[str]:
    return [argument for kind, argument in instructions(name) if kind == instruction]


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_an_image_copies_or_runs_exists(name: str) -> None:
    words = [word for run in arguments(name, "RUN") + arguments(name, "CMD") for word in re.findall(r"[\w./-]+", run)]
    words += [source for copy in arguments(name, "COPY") for source in copy.split()[:-1]]
    files = [word for word in words if word.startswith(("scripts/", "requirements/", "docker/"))]
    assert files and not [file for file in files if not (REPOSITORY / file).exists()]


def test_the_cpu_image_has_the_python_that_is_searched_first() -> None:
    [image] = arguments("cpu", "FROM")
    [version] = re.findall(r"^python:([\d.]+)-", image)
    assert f"for candidate in python{version} " in (REPOSITORY / "scripts" / "setup_venv.sh").read_text()
    assert f"PYTHON=python{version} scripts/setup_venv.sh --test" in arguments("cpu", "RUN")


def test_every_installation_of_the_gpu_image_is_constrained_by_its_lock() -> None:
    installs = [shlex.split(run) for run in arguments("gpu", "RUN") if "pip install" in run]
    assert len(installs) == 3
    for words in installs:
        assert words[words.index("-c") + 1] == "requirements/gpu.lock"


def test_the_gpu_lock_is_within_the_ranges_of_the_package() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "requirements" / "gpu.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    ranges = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["gpu"]]
    named = {r.name: r.specifier for r in ranges if r.name in pins}
    assert {"megatron-core", "mcore-bridge", "ms-swift", "transformers", "peft", "vllm", "transformer-engine"} <= set(
        named
    )
    assert not [name for name, specifier in named.items() if not specifier.contains(pins[name])]

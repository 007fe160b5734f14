"""Ask the registry what `pip install ".[gpu]"` chooses without the lock: it must be what ran on GPUs.

It takes 10 to 30 s and needs uv and a network; a new release of a package can make it fail, hence `slow`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from urllib.request import urlopen

import pytest

from tests.paths import REPOSITORY

pytestmark = pytest.mark.slow
# The versions that decide what a GPU runs. transformers is newer than on GPUs: the tests run with it on a CPU.
COMPARED = (
    "torch", "vllm", "transformer-engine", "transformer-engine-torch", "transformer-engine-cu13", "megatron-core",
    "mcore-bridge", "ms-swift", "peft", "flash-linear-attention", "fla-core",
)  # fmt: skip
REGISTRY = os.environ.get("UV_DEFAULT_INDEX", "https://pypi.org/simple")
ON_3_11 = {"megatron-core": "0.16.1"}  # what 3.11 has instead of the lock's; it ran on GPUs as well


@pytest.fixture(scope="module")
def uv() -> str:
    found = shutil.which("uv")
    if found is None:
        pytest.skip("uv, which resolves in seconds, is not installed: pip install uv")
    try:
        urlopen(f"{REGISTRY}/uv/", timeout=10).close()
    except OSError as error:
        pytest.skip(f"the registry {REGISTRY} cannot be reached: {error}")
    return found


@pytest.mark.parametrize(("python", "differs"), [("3.11", ON_3_11), ("3.12", {})])
def test_the_extras_resolve_to_what_ran_on_gpus(uv: str, python: str, differs: dict[str, str]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate",
               "--default-index", REGISTRY, "--python-version", python, "--python-platform", "x86_64-manylinux_2_28",
               "-"]  # fmt: skip
    named = "\n".join([*project["dependencies"], *extras["gpu"], *extras["math"]])
    done = subprocess.run(command, input=named, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    chosen = pins(done.stdout)

    ran = pins((REPOSITORY / "requirements" / "gpu.lock").read_text()) | differs
    assert {name: chosen.get(name) for name in COMPARED} == {name: ran[name] for name in COMPARED}


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text.replace("_", "-"), re.MULTILINE))

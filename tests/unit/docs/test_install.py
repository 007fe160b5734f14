"""The commands that install on a GPU are those of docker/gpu.Dockerfile, in README.md and docs/install.md."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.paths import REPOSITORY

OWN = '".[gpu]"'  # of the image; users also install the extra `math`


def pip_commands(text: str) -> list[list[str]]:
    """Return the words of each `pip install -c requirements/gpu.lock`, with the variables before it."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    found = [re.search(r"(?:\w+=\w+ )?pip install -c requirements/gpu\.lock .*", line) for line in lines]
    return [match[0].replace('".[gpu,math]"', OWN).split() for match in found if match]


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_the_commands_are_those_of_the_image(page: str) -> None:
    image = pip_commands((REPOSITORY / "docker" / "gpu.Dockerfile").read_text())
    assert len(image) == 3
    assert [sorted(command) for command in pip_commands((REPOSITORY / page).read_text())] == list(map(sorted, image))


def test_every_installation_is_from_a_clone_with_extras_that_exist() -> None:
    """No registry has the package yet."""
    patterns = ("*.md", "docs/*.md", "templates/*.sh", "docker/*", "swift_megatron_grpo/**/*.py")
    texts = [file.read_text() for pattern in patterns for file in REPOSITORY.glob(pattern)]
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [
        line for text in texts for line in text.splitlines() if re.search(r"\binstall .*swift-megatron-grpo\b", line)
    ]
    named = [
        name for text in texts for names in re.findall(r'install .*"\.\[([\w,]+)\]"', text) for name in names.split(",")
    ]
    assert {"gpu", "math"} <= set(named) <= extras.keys()

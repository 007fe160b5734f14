"""Add templates/ to the wheel as swift_megatron_grpo/templates. All other metadata is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithTemplates(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation reads templates/ where it is
            target = Path(self.build_lib) / "swift_megatron_grpo" / "templates"
            copytree("templates", target, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithTemplates})

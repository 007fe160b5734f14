"""Paths of the repository; tests take every path from here."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = REPOSITORY / "tests" / "programs"
GOLDEN = REPOSITORY / "tests" / "golden"
# PYTHONPATH of child processes. They inherit what is on it: scripts/test.sh puts other versions of megatron-core there.
IMPORT_PATH = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))

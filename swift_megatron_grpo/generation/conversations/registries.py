"""Validation of names that ms-swift looks up in a registry, some of them only after the model is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def check_registered(flag: str, names: Iterable[str], known: Iterable[str], registry: str) -> None:
    """Raise ValueError for the first unregistered name, suggesting similar registered names."""
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            suggestion = f"; did you mean {' or '.join(close)}?" if close else ";"
            raise ValueError(
                f"unknown name {name!r} in --{flag}{suggestion} known are {', '.join(known)}, and everything that a "
                f"file given to --external_plugins adds to {registry}"
            )

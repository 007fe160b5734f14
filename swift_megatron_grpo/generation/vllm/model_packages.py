"""Packages that ms-swift imports to load a model, also for rows of text. Without one it ends after the download."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from swift.model import get_matched_model_meta

# By ms-swift's model_type: what is imported, and what pip installs it all with.
_NEEDED: Mapping[str, tuple[tuple[str, ...], str]] = dict.fromkeys(
    ("qwen2_5_omni", "qwen3_omni_moe"),
    (("qwen_omni_utils", "av", "audioread", "librosa"), '"qwen-omni-utils>=0.0.9"'),
)


def fault_of_packages(model: str | None, model_type: str | None) -> str | None:
    """Return which package is missing to load --model, a folder or an id of a hub; None: none is."""
    kind = model_type or _type_of(model or "")
    packages, requirement = _NEEDED.get(kind or "", ((), ""))
    missing = next((package for package in packages if find_spec(package) is None), None)
    if missing is None:
        return None
    return (
        f"--model {model}: to load a {kind}, ms-swift needs the package {missing}, also for rows of text, and it is "
        f"not installed; pip install {requirement}"
    )


def _type_of(model: str) -> str | None:
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        kind: str | None = json.loads(config.read_text(encoding="utf-8")).get("model_type")
        return kind
    listed = get_matched_model_meta(model)
    return None if listed is None else str(listed.model_type)

"""Conflicts between servers about the image, video and audio parts of a composite model."""

from __future__ import annotations

from collections.abc import Mapping

_FLAG = '--vllm_limit_mm_per_prompt \'{"image": 0, "video": 0}\''


def vision_tower_conflicts(has_vision_tower: Mapping[str, bool]) -> list[str]:
    """Return the conflicts between the servers of a run, which all receive the same tensors."""
    if len(set(has_vision_tower.values())) < 2:
        return []
    holding = ", ".join(url for url, held in has_vision_tower.items() if held)
    return [
        f"some rollout servers hold the image and video parts of the model ({holding}) and others do not; start all of "
        f"them with {_FLAG}, or all without"
    ]

"""Servers of one run hold the image part of the model, or none of them does."""

from __future__ import annotations

from swift_megatron_grpo.generation.remote.vision_tower_conflicts import vision_tower_conflicts


def test_servers_that_are_alike_are_accepted() -> None:
    assert (
        vision_tower_conflicts({"http://a": True, "http://b": True})
        == vision_tower_conflicts({"http://a": False})
        == []
    )


def test_servers_that_differ_are_refused_with_the_flag() -> None:
    [problem] = vision_tower_conflicts({"http://a": True, "http://b": False})
    assert "(http://a)" in problem and """--vllm_limit_mm_per_prompt '{"image": 0, "video": 0}'""" in problem

"""Prepare every test process: megatron can be imported with or without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking.client import sockets_folder

# The files that take longest, the longest first. They start first, so that no worker is left alone with one at the end.
_LONGEST = (
    "e2e/test_server.py", "e2e/test_stop.py", "e2e/test_router_replay.py", "e2e/test_scripts.py", "e2e/test_cli.py",
    "e2e/test_images.py", "e2e/test_composite.py", "e2e/test_rollout_command.py", "e2e/test_sync_check.py",
    "e2e/test_accepted_flags.py", "e2e/test_checkpoints.py", "e2e/test_async.py", "e2e/test_server_turns.py",
    "e2e/test_stuck.py", "e2e/test_commands_untouched.py", "e2e/test_server_attacks.py", "e2e/test_algorithms.py",
    "e2e/test_replay.py", "e2e/test_resume.py", "e2e/test_adapter_settings.py", "e2e/test_multi_turn.py",
    "e2e/test_parity.py", "e2e/test_generation.py",
    "dist/test_composite_layouts.py", "dist/test_image_layouts.py", "dist/test_layouts.py",
    "dist/test_router_replay.py", "dist/test_engine_runs.py", "dist/test_expert_chunks.py",
    "unit/plugin/test_torchrun.py", "unit/runtime/deadlines/test_deadlines.py", "unit/grading/test_advantages.py",
    "unit/training/head/test_softmax_triton.py", "unit/plugin/test_api_key_flag.py", "unit/cli/doctor/test_doctor.py",
    "unit/training/moe/test_weighted_swiglu.py",
    "unit/training/loss/test_loss.py", "unit/output/recording/test_damage.py", "unit/arguments/test_grpo_arguments.py",
    "unit/plugin/test_autoload.py", "unit/platforms/cpu/test_torchvision_operators.py",
    "unit/runtime/stopping/test_second_signal.py", "unit/grading/test_rewards.py", "unit/test_style.py",
    "unit/training/upstream_fixes/test_result_queue.py", "unit/generation/server/test_schema.py",
    "unit/test_security.py",
    "unit/weights/transport/test_channel.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    sockets_folder()  # before xdist starts its workers, which then share the fork servers
    if not config.getoption("tx", None) or hasattr(config, "workerinput"):
        prepare_for_tests()  # a process that only waits for workers saves its imports


def prepare_for_tests() -> None:
    import torch
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)  # a test may be slow because the machine is busy
    settings.load_profile("patient")
    if not torch.cuda.is_available():
        from swift_megatron_grpo.platforms.cpu import activate

        activate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone", choices=("yes", "no"), help="run only tests that are marked `alone`, or only the others"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and apply --alone."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    if choice := config.getoption("--alone"):
        groups: dict[str, list[pytest.Item]] = {"yes": [], "no": []}
        for item in items:
            groups["yes" if item.get_closest_marker("alone") else "no"].append(item)
        items[:] = groups.pop(choice)
        [others] = groups.values()
        config.hook.pytest_deselected(items=others)

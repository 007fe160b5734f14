"""Installs fast_schedule.py and fast_outputs.py in an engine whose core runs in this process.

Tests: tests/unit/generation/vllm/test_fast_decoding.py, tests/contract/test_scheduler_seam.py.
"""

from __future__ import annotations

from typing import Any

from swift.utils import get_logger
from vllm.v1.engine.core_client import InprocClient

from swift_megatron_grpo.generation.vllm.fast_outputs import FastOutputs
from swift_megatron_grpo.generation.vllm.fast_schedule import FastSchedule
from swift_megatron_grpo.generation.vllm.known_scheduler import known_scheduler
from swift_megatron_grpo.generation.vllm.running_requests import RunningRequests

logger = get_logger()


def speed_up_decoding(engine: Any) -> bool:
    """Install both in vLLM's LLMEngine. Returns False, and changes nothing, if vLLM's own functions must run."""
    if type(engine.engine_core) is not InprocClient:
        return False
    scheduler = engine.engine_core.engine_core.scheduler
    known = known_scheduler(scheduler)
    if known is None:
        logger.info("vLLM's scheduler or its settings are not those that this package speeds up; generation is slower")
        return False
    running = RunningRequests(scheduler)
    scheduler.schedule = FastSchedule(scheduler, known, running)
    scheduler.update_from_output = FastOutputs(scheduler, known, running)
    return True

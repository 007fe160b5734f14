"""The versions of vLLM whose scheduler this package knows line by line, and the settings in which it takes part.

fast_schedule.py and fast_outputs.py make the same changes to vLLM's state as functions of vLLM, with less work, so they
depend on the text of these functions. A digest of the text decides, not a version: with any other text, or with a
setting that the two do not cover, vLLM's own functions run.
"""

import functools
import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

from vllm.multimodal import utils as multimodal
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator as Coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.request import Request

_OFF = (
    "log_stats connector ec_connector use_pp use_eagle num_lookahead_tokens is_encoder_decoder "
    "need_mamba_block_aligned_split needs_kv_cache_zeroing"
)


@dataclass(frozen=True, slots=True)
class KnownScheduler:
    """Holds what differs between the known versions, as in vLLM 0.25. Names are attributes of vLLM's objects."""

    version: str
    # of the scheduler: more features that must be off
    off: str = "enable_return_routed_experts defer_block_free"
    # of the scheduler: the largest number of running requests
    most_running: str = "max_num_running_reqs"
    # of a request: output in flight that a reset of its cache has made worthless
    stale_output: str = "async_tokens_to_discard"
    stagger: str = "pp_size"  # of the asynchronous scheduler: steps between two tokens of a request
    other_prompt_outputs: tuple[str, ...] = ()  # of the runner's output, in addition to the log-probs of prompts
    counts_in_flight: bool = False  # a request counts its tokens in flight
    has_common_prefix: bool = True  # the scheduler's output has the blocks that all requests have in common
    always_tracks_previous: bool = False  # the requests of the previous step are kept for both model runners
    drafts_on_device: bool = False  # as many as the number of requests says, in the asynchronous scheduler


KNOWN = {
    "93ca2b2580e10b84": KnownScheduler("0.23.0", off="enable_return_routed_experts", always_tracks_previous=True),
    "7da165b15b7589be": KnownScheduler("0.24.0"),
    "0993a79daed4d4da": KnownScheduler("0.25.1"),  # also 0.25.0
    "d6a4f27119cd8598": KnownScheduler(
        "0.32.0",
        off="aux_output_connector return_sampling_mask is_mm_encoder_only defer_block_free",
        most_running="max_num_active_reqs",
        stale_output="num_stale_output_tokens",
        stagger="decode_stagger",
        other_prompt_outputs=("prompt_token_id_logprobs_dict",),
        counts_in_flight=True,
        has_common_prefix=False,
        drafts_on_device=True,
    ),
}

_METHODS: dict[Any, str] = {
    Scheduler: """schedule update_from_output _update_after_schedule _make_cached_request_data
        _update_request_with_output _preempt_request _handle_stopped_request get_request_counts
        _try_schedule_encoder_inputs _free_encoder_inputs""",
    EncoderCacheManager: "get_cached_input_ids",
    multimodal: "get_mm_features_in_window",
    AsyncScheduler: "_update_after_schedule _update_request_with_output",
    utils: "check_stop",
    KVCacheManager: "allocate_slots cache_blocks create_kv_cache_blocks new_step_starts",
    KVCacheCoordinator: """get_num_blocks_to_allocate allocate_new_blocks cache_blocks remove_skipped_blocks
        new_step_starts""",
    SingleTypeKVCacheManager: """get_num_blocks_to_allocate allocate_new_blocks cache_blocks remove_skipped_blocks
        get_num_skipped_tokens new_step_starts""",
    FullAttentionManager: "",
    Coordinator: "",
    KVCacheCoordinatorNoPrefixCache: "",
    kv_cache_utils: "get_request_block_hasher",
    Request: "append_output_token_ids update_block_hashes",
    EngineCore: "step step_with_batch_queue",
    InprocClient: "get_output",
    OutputProcessor: "process_outputs",
    RequestState: "make_request_output",
    IncrementalDetokenizer: "",
}


def digest() -> str:
    """Return a digest of the text of all functions that matter, and of whole classes where all of it does."""
    texts = list[str]()
    try:
        for owner, names in _METHODS.items():
            # the code object, so that a function that wraps vLLM's is not taken for it
            parts = [getattr(owner, name).__code__ for name in names.split()] or [owner]
            texts += map(_text, parts)
    except (AttributeError, OSError):  # vLLM has no such function, or no text of it
        return "unknown"
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


@functools.cache  # the forks of tests/forking find all texts, which take a third of a second
def _text(part: Any) -> str:
    return inspect.getsource(part)


def known_scheduler(scheduler: Any) -> KnownScheduler | None:
    """Return what is known of this scheduler; None: vLLM's own functions must run."""
    if type(scheduler) not in (Scheduler, AsyncScheduler):
        return None
    known = KNOWN.get(digest())
    return known if known is not None and _fits(scheduler, known) else None


def _fits(scheduler: Any, known: KnownScheduler) -> bool:
    """Return True if the settings are covered: text, one kind of attention, drafts by the device if any."""
    if scheduler.num_spec_tokens and not (
        known.drafts_on_device
        and type(scheduler) is AsyncScheduler
        and scheduler.use_v2_model_runner
        and scheduler.dynamic_sd_lookup is not None
    ):
        return False
    off = f"{_OFF} {known.off}".split()
    if any(getattr(scheduler, name) for name in off) or scheduler.finished_req_ids_dict is not None:
        return False
    if scheduler.dcp_world_size * scheduler.pcp_world_size != 1:
        return False
    coordinator = scheduler.kv_cache_manager.coordinator
    managers = coordinator.single_type_managers
    return (
        type(coordinator) in (Coordinator, KVCacheCoordinatorNoPrefixCache)
        and len(managers) == 1
        and type(managers[0]) is FullAttentionManager
        and managers[0].block_size == coordinator.block_pool.hash_block_size
    )

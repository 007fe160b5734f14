"""vLLM's scheduler and output processor without a model: tokens follow from the request and their position.

Two such runs are compared step by step in test_fast_decoding.py. The order of calls is that of EngineCore: a step is
scheduled before the output of the previous one is processed, if the scheduler is the asynchronous one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from swift_megatron_grpo.generation.vllm.device_drafts import engine_settings

BLOCK = 4
LONGEST = 96
VOCABULARY = 40
IMAGE_TOKENS = 24  # of all images whose embeddings are kept


@dataclass(frozen=True)
class Setting:
    """Settings of a scheduler. `batched`: tokens of all requests in one step at most."""

    is_async: bool = True
    v2_runner: bool = True
    blocks: int = 400
    most_running: int = 32
    batched: int = 512
    caches: bool = True
    extra_columns: int = 0  # beside the log-prob of the sampled token
    drafts: int = 0  # of a request at most


class ScheduledRun:
    """`folder` holds the configuration of a model."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        config = _config(setting, folder)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(setting.blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncScheduler if setting.is_async else Scheduler
        self.scheduler = kind(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.scheduler.use_v2_model_runner = setting.v2_runner
        self.scheduler.max_num_encoder_input_tokens = IMAGE_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=IMAGE_TOKENS)
        self.processor = OutputProcessor(None, log_stats=False)
        self.passed_on: list[list[tuple[str, int]]] = []  # ids and tokens that reach the output processor in a step
        self._in_flight: deque[Any] = deque()
        self._rejected: dict[str, int] = {}  # drafts of the last step, which the scheduler may not know yet
        self._seen: dict[str, list[int]] = {}  # tokens of the prompt, computed tokens
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256) if setting.caches else None

    def add(self, name: str, prompt: list[int], params: SamplingParams, images: Sequence[tuple[int, int]] = ()) -> None:
        """`images`: begin and length of each in the prompt."""
        features = [
            MultiModalFeatureSpec(None, "image", f"{length}", PlaceholderRange(offset=begin, length=length))
            for begin, length in images
        ]
        core = EngineCoreRequest(
            request_id=name, prompt_token_ids=prompt, mm_features=features, sampling_params=params.clone(),
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
            external_req_id=name,
        )  # fmt: skip
        self.processor.add_request(core, None)
        self.scheduler.add_request(Request.from_engine_core_request(core, self._hasher))

    def abort(self, names: list[str]) -> None:
        self.processor.abort_requests(names, internal=True)
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    @property
    def is_over(self) -> bool:
        return not (self._in_flight or self.scheduler.has_requests())

    def step(self) -> tuple[Any, list[Any]]:
        """Return what was scheduled, and the requests that the step has finished or has to report."""
        scheduled = None
        depth = 2 if self.setting.is_async else 1
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._in_flight.append((scheduled, self._generate(scheduled)))
        if not self._in_flight or (len(self._in_flight) < depth and self.scheduler.has_requests()):
            return _plain(scheduled), []
        outputs = self.scheduler.update_from_output(*self._in_flight.popleft())
        own = outputs.get(0) or EngineCoreOutputs()
        self.passed_on.append([(output.request_id, len(output.new_token_ids)) for output in own.outputs])
        processed = self.processor.process_outputs(own.outputs)
        assert not processed.reqs_to_abort
        return _plain(scheduled), [_report(output) for output in processed.request_outputs]

    def state(self) -> Any:
        """Return all that the scheduler knows."""
        return _plain({name: value for name, value in vars(self.scheduler).items() if name not in _NOT_STATE})

    def _generate(self, scheduled: Any) -> ModelRunnerOutput:
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self._seen[new.req_id] = [len(tokens), new.num_computed_tokens]
        data, rejected = scheduled.scheduled_cached_reqs, self._rejected if self._in_flight else {}
        self._rejected = {}
        for name, computed, output in zip(data.req_ids, data.num_computed_tokens, data.num_output_tokens, strict=True):
            self._seen[name][1] = computed - rejected.get(name, 0)
            if name in data.resumed_req_ids:
                self._seen[name][0] = len(self.scheduler.requests[name].prompt_token_ids) + output
        names = list(scheduled.num_scheduled_tokens)
        random.Random(len(names)).shuffle(names)  # a runner has an order of its own
        sampled, columns = [], self.setting.extra_columns + 1
        drafted = [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        begins = [0, *np.cumsum([1 + drafts for drafts in drafted]).tolist()]  # rows, one behind each draft
        shape = (begins[-1], columns)
        ids, values, ranks = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(begins[-1], np.int64)
        prompts: dict[str, Any] = {}
        for name, drafts, begin in zip(names, drafted, begins, strict=False):
            first = self._seen[name][1] + scheduled.num_scheduled_tokens[name] - drafts
            for row, end in enumerate(range(first, first + drafts + 1), begin):
                generator = np.random.default_rng([len(name), *name.encode(), end])
                ids[row], values[row] = generator.integers(2, VOCABULARY, columns), generator.normal(size=columns)
                ranks[row] = generator.integers(1, 9)
            accepted = int(ids[begin, 0]) % (drafts + 1)
            end = self._seen[name][1] = first + accepted
            self._rejected[name] = drafts - accepted
            sampled.append(ids[begin : begin + accepted + 1, 0].tolist() if end >= self._seen[name][0] else [])
            prompt = self.scheduler.requests[name].num_prompt_tokens if name in self.scheduler.requests else 0
            if name.startswith("scored") and end == prompt:
                prompts[name] = LogprobsTensors(
                    torch.arange(prompt - 1)[:, None], torch.rand(prompt - 1, 1, generator=torch.manual_seed(0)),
                    torch.ones(prompt - 1, dtype=torch.int64),
                )  # fmt: skip
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(ids, values, ranks, begins if any(drafted) else None) if names else None,
            prompt_logprobs_dict=prompts,
            num_nans_in_logits=None if self.setting.v2_runner else {},
        )


_NOT_STATE = {"schedule", "update_from_output", "vllm_config", "structured_output_manager"}
_NOT_OF_A_REQUEST = {"_block_hasher", "sampling_params", "output_token_ids", "all_token_ids", "arrival_time"}


def write_config(folder: Path) -> None:
    Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=LONGEST, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip


@lru_cache
def _config(setting: Setting, folder: Path) -> Any:
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=LONGEST,
        max_num_seqs=setting.most_running, max_num_batched_tokens=setting.batched,
        enable_prefix_caching=setting.caches, disable_log_stats=True,
        **(engine_settings(setting.drafts, setting.most_running) if setting.drafts else {}),
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = setting.blocks
    config.scheduler_config.async_scheduling = setting.is_async
    return config


def _report(output: Any) -> Any:
    [answer] = output.outputs
    logprobs = answer.logprobs
    return (
        output.request_id, output.finished, output.num_cached_tokens, answer.text, list(answer.token_ids),
        answer.finish_reason, answer.stop_reason, answer.cumulative_logprob,
        [_plain(position) for position in logprobs] if isinstance(logprobs, list) else _plain(logprobs),
        None if output.prompt_logprobs is None else len(output.prompt_logprobs),
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """Return nested lists of numbers and strings, which can be compared."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list) and value and isinstance(value[0], KVCacheBlock):
        return [(block.block_id, block.ref_cnt, block.block_hash) for block in value]
    if isinstance(value, KVCacheBlock):
        return (value.block_id, value.ref_cnt, value.block_hash)
    if isinstance(value, FreeKVCacheBlockQueue):
        return [block.block_id for block in value.get_all_free_blocks()]
    if isinstance(value, Request):
        return [
            (name, len(item) if name == "_all_token_ids" else _plain(item))
            for name, item in sorted(vars(value).items())
            if name not in _NOT_OF_A_REQUEST
        ]
    if isinstance(value, BlockHashToBlockMap):  # in which vLLM looks up hashes, in no order
        return sorted(_plain(value._cache))
    if isinstance(value, Mapping):
        return [(str(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(_request_or_plain, value))
    if isinstance(value, Iterable):
        return [_request_or_plain(item) for item in value]
    if is_dataclass(value):
        return [(field.name, _plain(vars(value)[field.name])) for field in fields(value)]
    if type(value).__module__.startswith("vllm.v1.core") and hasattr(value, "__dict__"):
        return [(name, _plain(item)) for name, item in vars(value).items() if name not in _LARGE]
    return type(value).__name__


_LARGE = {"kv_cache_config", "metrics_collector", "vllm_config"}


def _request_or_plain(value: Any) -> Any:
    return value.request_id if isinstance(value, Request) else _plain(value)


def params(**values: Any) -> SamplingParams:
    """Return parameters as those of a completion."""
    made = SamplingParams(**{"temperature": 1.0, "detokenize": False, "flat_logprobs": True, **values})
    made.update_from_generation_config({}, 1)
    return made

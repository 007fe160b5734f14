"""Samples seeded requests with noise that belongs to a seed and a position, all rows at once.

vLLM's first model runner gives each seeded request a random number generator and draws from one after the other: a
kernel launch for each completion and token. Its second runner has noise of seed and position already. With such noise
a token depends on its request alone: not on the batch, on preemption or on where a completion was cut and continued.
vLLM applies penalties, temperature, min-p, top-k and top-p, and computes the log-probs. Drafts are verified by the same
noise (verification.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from swift_megatron_grpo.generation.vllm.verification import accepted
from swift_megatron_grpo.runtime.import_hooks import after_import
from swift_megatron_grpo.runtime.replaced import replaced

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
Integers = np.ndarray[Any, np.dtype[np.int64]]  # one for each row

# logits after penalties, temperature and min-p, generators, top-k, top-p -> tokens, and log-probs if they are wanted
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests whose next tokens are sampled together."""

    seeds: Integers  # 0 where there is none
    positions: Integers  # of the sampled tokens in their texts
    seeded: list[bool]
    needs_others: bool  # requests without a seed, whose tokens are not the most likely ones, are among them

    def behind(self, drafts: Sequence[int]) -> Rows:
        """Return the rows behind the last draft of each request."""
        return replace(self, positions=self.positions + np.asarray(drafts))

    def of_drafts(self, drafts: Sequence[int]) -> Rows:
        """Return the rows that decide on drafts, request by request."""
        counts = np.asarray(drafts)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return replace(self, seeds=np.repeat(self.seeds, counts), positions=np.repeat(self.positions, counts) + offsets)


def sample_by_position() -> None:
    """Install this in the process; once is enough."""
    after_import(_RUNNER, install_in)


def install_in(module: ModuleType) -> None:
    """Wrap the function by which the first model runner samples a step."""
    runner = module.GPUModelRunner
    stock = runner._sample
    if stock.__module__ == __name__:
        return

    def sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        rows = rows_of(self)
        if rows is None:
            return stock(self, logits, spec_decode_metadata)
        self.input_batch.generators.clear()  # also, vLLM turns them back after steps that sample no token
        sampler = self.sampler.topk_topp_sampler
        drafts = [] if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        if not any(drafts):  # a plain step, also where vLLM comes with metadata of no drafts
            with replaced(sampler, "forward", partial(sample_rows, rows, sampler.forward, sampler.logprobs_mode)):
                return stock(self, logits, None)
        from vllm.v1.sample import rejection_sampler

        behind = partial(sample_rows, rows.behind(drafts), sampler.forward, sampler.logprobs_mode)
        with (
            replaced(sampler, "forward", behind),
            replaced(rejection_sampler, "rejection_sample", partial(verify, rows)),
        ):
            return stock(self, logits, spec_decode_metadata)

    runner._sample = sample


def rows_of(runner: Any) -> Rows | None:
    """Return the seeds and positions of a step's rows; None if no request has a seed."""
    batch = runner.input_batch
    seeds = [runner.requests[name].sampling_params.seed for name in batch.req_ids]
    seeded = [seed is not None for seed in seeds]
    if not any(seeded):
        return None
    others = any(name in batch.random_reqs for name, has in zip(batch.req_ids, seeded, strict=True) if not has)
    positions = batch.num_tokens_no_spec[: len(seeds)].astype(np.int64)
    return Rows(np.array([seed or 0 for seed in seeds], np.int64), positions, seeded, others)


def verify(
    rows: Rows,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: Sequence[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    metadata: Any,
    **_: Any,
) -> torch.Tensor:
    """Stand in for `rejection_sample`: drafted rows get the noise that their positions have without drafts."""
    if rows.needs_others and any(n and not seeded for n, seeded in zip(num_draft_tokens, rows.seeded, strict=True)):
        raise RuntimeError("a request without a seed has drafts, which are exact for seeded requests alone")
    drafted = rows.of_drafts(num_draft_tokens)
    sample = partial(noisy_argmax, seeds=drafted.seeds, positions=drafted.positions)
    greedy = None if metadata.all_greedy else metadata.temperature == 0
    return accepted(sample, draft_token_ids, num_draft_tokens, max_spec_len, target_logits, bonus_token_ids, greedy)


def sample_rows(
    rows: Rows,
    stock: Forward,
    logprobs_mode: str,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stand in for `TopKTopPSampler.forward`: seeded rows get their own noise, others what vLLM draws for them."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    sampled = noisy_argmax(logits, rows.seeds, rows.positions)
    if rows.needs_others:
        others, kept = stock(logits, generators, None, None)
        return torch.where(_sent(rows.seeded, torch.bool, logits.device), sampled, others), kept
    if logprobs_mode == "processed_logprobs":
        return sampled, logits.log_softmax(dim=-1, dtype=torch.float32)
    return sampled, logits if logprobs_mode == "processed_logits" else None


def noisy_argmax(logits: torch.Tensor, seeds: Integers, positions: Integers) -> torch.Tensor:
    """Sample each row of [rows, vocabulary]: the argmax of logits and Gumbel noise of its seed, position and tokens."""
    if not logits.is_cuda:
        noise = torch.from_numpy(mixed(seeds, positions))
        sampled: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logits.float(), noise)
        return sampled
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    # The second runner counts the noise of a token by the token before it. With the same, runners sample the same.
    seeds_there, positions_there = _sent(np.stack([seeds, positions - 1]), torch.int64, logits.device)
    indices = torch.arange(len(seeds), dtype=torch.int32, device=logits.device)
    not_greedy = torch.ones(len(seeds), device=logits.device)  # its temperature, which is applied already
    by_kernel: torch.Tensor = gumbel_sample(logits, indices, not_greedy, seeds_there, positions_there,
                                            apply_temperature=False, **_of_target(gumbel_sample))  # fmt: skip
    return by_kernel


def mixed(seeds: Integers, positions: Integers) -> Integers:
    """Return a seed of 63 bits for each pair, by a round of SplitMix64 for the seed and one for the position."""
    state = np.zeros(len(seeds), np.uint64)
    for values in (seeds, positions):
        state = state + values.astype(np.uint64) + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(1)).astype(np.int64)


@cache
def _of_target(kernel: Callable[..., torch.Tensor]) -> dict[str, bool]:
    """Return the argument of vLLM 0.32 and later that says whose tokens are sampled."""
    return {"is_drafting": False} if "is_drafting" in inspect.signature(kernel).parameters else {}


def _sent(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return values as a tensor on the device, without waiting for what runs there."""
    here = torch.as_tensor(values, dtype=dtype)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)

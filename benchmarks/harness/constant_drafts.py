"""Drafts that cost nothing and are never accepted, for vLLM's two model runners: only the verified rows are timed."""

from __future__ import annotations

from typing import Any

import torch

TOKEN = 5  # of a whole vocabulary, which random weights sample from evenly


class ConstantProposer:
    """The `custom_class` of a speculative configuration, in vLLM's first model runner."""

    def __init__(self, vllm_config: Any) -> None:
        self._depth: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Draft for every request that has sampled a token; the others are in their prompts."""
        return [[TOKEN] * self._depth if sampled else [] for sampled in sampled_token_ids]


class ConstantSpeculator:
    """Stands in for the speculators of vLLM's second model runner, which has no `custom_class`."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are certain tokens, not samples
    num_query_per_req = 1
    num_extra_query_per_req = 0

    def __init__(self, vllm_config: Any, device: torch.device, *_: Any) -> None:
        depth = vllm_config.speculative_config.num_speculative_tokens
        requests = vllm_config.scheduler_config.max_num_seqs
        self.model = torch.nn.Identity()  # the runner prepares its communication
        self._drafts = torch.full((requests, depth), TOKEN, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, *_: Any) -> None:
        """Need no graphs: no kernel runs."""

    def capture(self, *_: Any) -> None:
        """Capture nothing."""

    def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Return drafts [requests, depth]; the scheduler takes as many of each row as it wants."""
        return self._drafts[: input_batch.num_reqs]


def install_in_second_runner() -> None:
    """Make vLLM's second model runner draft by ConstantSpeculator where its configuration says `ngram_gpu`.

    That method needs no draft model and keeps asynchronous scheduling. vLLM 0.25 has it in the first runner only.
    """
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner

    vars(model_runner)["init_speculator"] = ConstantSpeculator
    unsupported = VllmConfig._get_v2_model_runner_unsupported_features

    def without_ngram(self: Any) -> list[str]:
        return [feature for feature in unsupported(self) if "ngram" not in feature]

    VllmConfig._get_v2_model_runner_unsupported_features = without_ngram

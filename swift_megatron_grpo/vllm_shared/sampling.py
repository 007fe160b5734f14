"""What vLLM is asked for, and what is read of its answer: for engines in this process and for servers.

ms-swift's `infer` makes vLLM turn every token into text as it comes and report every request at every step, and then
turns each token into text once more beside its log-prob. On an H200 that was a quarter of the time of generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.infer_engine import GRPOVllmEngine, RequestConfig
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind


def sampling_params(engine: GRPOVllmEngine, inputs: dict[str, Any], request: RequestConfig) -> SamplingParams:
    """`inputs`: the encoded prompt, which decides how much room is left. `request` may be changed."""
    engine.set_default_max_tokens(request, inputs)
    params = engine._prepare_generation_config(request)
    engine._add_stop_words(params, request)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True
    # A stop word that is one token ends a completion as a token; only longer ones have to be looked for in the text.
    params.stop = [word for word in params.stop if not engine._get_stop_token_ids([word])]
    params.detokenize = bool(params.stop)
    return params


def sampled_logprobs(answer: Any) -> list[float]:
    """[c]. Only the sampled token's was asked for, so there is one for each position."""
    values: list[float] = list(answer.logprobs.logprobs)
    assert len(values) == len(answer.token_ids)
    return values


def scoring_params() -> SamplingParams:
    """For the log-probs of a text. Greedy: a sampled token would move the random numbers of the completions to come."""
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def text_logprobs(output: Any, tokens: Sequence[int]) -> list[float]:
    """Of every token but the first, of an answer to scoring_params."""
    return [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]

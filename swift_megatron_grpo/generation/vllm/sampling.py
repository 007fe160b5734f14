"""vLLM requests for completions and for log-probs of a text, and their results; for colocate and for servers.

ms-swift's `infer` makes vLLM detokenize every token as it is sampled and report every request after every step, and
then detokenizes every token again for its log-prob. On an H200 that took a quarter of the time of generation.
"""

from collections.abc import Iterator
from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image
from swift.infer_engine import GRPOVllmEngine, RequestConfig
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.data.image_formats import placeholder_of
from swift_megatron_grpo.data.recordings import RATE, samples_of
from swift_megatron_grpo.data.videos import Frames, for_engine
from swift_megatron_grpo.generation.protocol.messages import NO_WEIGHTS, Completion
from swift_megatron_grpo.generation.vllm.images import drops_marks_of_videos
from swift_megatron_grpo.types import ScoredText


def sampling_params(engine: GRPOVllmEngine, inputs: dict[str, Any], request: RequestConfig) -> SamplingParams:
    """Return the parameters of one request for a completion; ValueError if its encoded prompt leaves no room."""
    prompt = engine._get_num_tokens(inputs)
    room: int = engine.max_model_len - prompt + engine.max_tokens_offset  # ms-swift logs each one that is limited
    if room < 1:
        raise ValueError(
            f"a prompt of {prompt} tokens leaves no room for a completion within --vllm_max_model_len "
            f"{engine.max_model_len}; use a larger --vllm_max_model_len, or a smaller --max_length with "
            "--truncation_strategy delete"
        )
    request.max_tokens = min(request.max_tokens or room, room)
    params = engine._prepare_generation_config(request)
    engine._add_stop_words(params, request)
    read_at_the_end(engine, params)
    return params


def read_at_the_end(engine: GRPOVllmEngine, params: SamplingParams) -> None:
    """Make vLLM report a request once, as tokens and numbers. Requests for more than that keep ms-swift's way."""
    params.output_kind = RequestOutputKind.FINAL_ONLY
    if params.logprobs or params.prompt_logprobs is not None:
        return
    params.flat_logprobs = True
    # An added token, such as the end of a turn, is matched as a token. Any other word must be searched in the text: one
    # of a single token may be a part of others as well, as "\n" of "\n\n".
    added = _added_tokens(engine.tokenizer)
    params.stop = [word for word in params.stop if word not in added or not engine._get_stop_token_ids([word])]
    params.detokenize = bool(params.stop)


@cache
def _added_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the texts that are always tokens of their own."""
    return frozenset((*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens))


def to_completions(engine: GRPOVllmEngine, inputs: dict[str, Any], result: Any) -> Iterator[Completion]:
    """Yield what vLLM has generated from the encoded prompt `inputs`."""
    for output in result.outputs:
        token_ids = list(output.token_ids)
        logprobs = None if output.logprobs is None else list(output.logprobs.logprobs)  # no others were requested
        assert logprobs is None or len(logprobs) == len(token_ids)
        yield Completion(
            prompt_ids=list(result.prompt_token_ids),
            completion_ids=token_ids,
            logprobs=logprobs,
            text=engine.template.decode_generate_ids(token_ids, template_inputs=inputs["template_inputs"]),
            finish_reason=output.finish_reason,
            weights_version=NO_WEIGHTS,  # set by the engine
            routed_experts=output.routed_experts,
        )


def scoring_params() -> SamplingParams:
    """Return the parameters of a request for the log-probs of a text. Greedy: no random number is used for it."""
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def scoring_input(text: ScoredText, processor: Any) -> dict[str, Any]:
    """Return the prompt of a request for the log-probs of a text. `processor`: of the engine's template."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(text.tokens)}
    media: dict[str, Any] = {}
    if text.recording is not None:
        media["audio"] = [(samples_of(text.recording), RATE)]
    if text.image is not None:
        with Image.open(BytesIO(text.image), formats=["PNG"]) as image:
            media["image"] = image.convert("RGB")
    options = {"do_resize": False}
    if text.video is not None:
        media["video"] = [for_engine(text.video)]
        if sound := Frames.of_file(text.video).sound:
            media["audio"] = [(samples_of(sound), RATE)]
            options["use_audio_in_video"] = True
        if drops_marks_of_videos(processor):
            start = text.tokens.index(placeholder_of("video", processor)) - 1
            end = start + 2  # the marks around the placeholder, which have to be there twice
            prompt["prompt_token_ids"] = [*text.tokens[: start + 1], *text.tokens[start : end + 1], *text.tokens[end:]]
        options["do_sample_frames"] = False
    return prompt | ({"multi_modal_data": media, "mm_processor_kwargs": options} if media else {})


def text_logprobs(output: Any) -> list[float]:
    """Return the log-probs of all tokens but the first, those of an image included, after a request for scoring."""
    tokens = output.prompt_token_ids
    return [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]

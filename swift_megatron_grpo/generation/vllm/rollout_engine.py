"""ms-swift's vLLM engine, for the media and the log-probs of rollouts."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from swift.infer_engine import GRPOVllmEngine
from vllm.logprobs import FlatLogprobs

from swift_megatron_grpo.data.encoders import encode_as_engine
from swift_megatron_grpo.generation.vllm.images import tokens_of_media


class RolloutEngine(GRPOVllmEngine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        encode_as_engine(self.template)

    def _get_num_tokens(self, inputs: dict[str, Any], batch_idx: int | None = None) -> int:
        """Count all tokens of an image, of which ms-swift counts the one placeholder."""
        tokens: int = GRPOVllmEngine._get_num_tokens(inputs, batch_idx)
        return tokens + tokens_of_media(self.template.processor, inputs)

    def _get_logprobs(
        self, logprobs: Any, token_ids: Sequence[int], top_logprobs: int | None = None
    ) -> dict[str, Any] | None:
        """Return ms-swift's entries also for log-probs that vLLM reports as numbers, one for each token."""
        if not isinstance(logprobs, FlatLogprobs):
            entries: dict[str, Any] | None = super()._get_logprobs(logprobs, token_ids, top_logprobs)
            return entries
        assert len(logprobs.logprobs) == len(token_ids)
        texts = map(self._text_of_token, token_ids)
        return (
            {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode())}
                    for text, logprob in zip(texts, logprobs.logprobs, strict=True)
                ]
            }
            if token_ids
            else None
        )

    @cached_property
    def _text_of_token(self) -> Callable[[int], str]:
        """Decode a token. ms-swift decodes every sampled token on its own, for 20 microseconds each."""
        return lru_cache(maxsize=None)(self.tokenizer.decode)

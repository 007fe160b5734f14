"""Log-probs that vLLM reports as numbers become the entries that ms-swift makes of its objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swift.infer_engine import GRPOVllmEngine, RequestConfig
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind

from swift_megatron_grpo.cli.tiny_models import IM_END, make_tokenizer
from swift_megatron_grpo.generation.vllm.rollout_engine import RolloutEngine
from swift_megatron_grpo.generation.vllm.sampling import read_at_the_end

TEXT = "Hello, 7 wörlds ✓ twice twice"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class without vLLM: only its tokenizer is read."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    engine = RolloutEngine.__new__(RolloutEngine)
    vars(engine)["processor"] = AutoTokenizer.from_pretrained(folder)
    return engine


def test_numbers_and_objects_give_the_same_entries(engine: Any) -> None:
    tokens = engine.tokenizer.encode(TEXT)
    values = [-0.5 * place for place in range(len(tokens))]
    objects = [{token: Logprob(value, 1, None)} for token, value in zip(tokens, values, strict=True)]
    numbers = FlatLogprobs()
    for token, value in zip(tokens, values, strict=True):
        numbers.append({token: Logprob(value, 1, None)})
    found = engine._get_logprobs(numbers, tokens, None)
    assert found == GRPOVllmEngine._get_logprobs(engine, objects, tokens, None)
    assert [entry["logprob"] for entry in found["content"]] == values


@pytest.mark.parametrize("none", [FlatLogprobs(), None])
def test_a_turn_without_tokens_has_none(engine: Any, none: Any) -> None:
    assert engine._get_logprobs(none, [], None) is None


def test_an_ordinary_request_is_read_as_tokens(engine: Any) -> None:
    params = SamplingParams(logprobs=0, stop=[IM_END, "two words"])
    read_at_the_end(engine, params)
    assert params.stop == ["two words"] and params.detokenize and params.flat_logprobs
    params = SamplingParams(logprobs=0, stop=[IM_END])
    read_at_the_end(engine, params)
    assert not params.stop and not params.detokenize and params.flat_logprobs


def test_a_stop_word_that_may_be_a_part_of_tokens_is_searched_in_texts(engine: Any) -> None:
    """A token of its own is not the only one that has it: most tokenizers have one for two newlines."""
    assert len(engine.tokenizer.encode("\n", add_special_tokens=False)) == 1
    params = SamplingParams(logprobs=0, stop=["\n", IM_END])
    read_at_the_end(engine, params)
    assert params.stop == ["\n"] and params.detokenize


@pytest.mark.parametrize("more", [{"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 1}])
def test_a_request_for_more_keeps_its_objects_and_texts(engine: Any, more: dict[str, int]) -> None:
    params = SamplingParams(stop=["two words"], **more)
    read_at_the_end(engine, params)
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert not params.flat_logprobs and params.detokenize and params.stop == ["two words"]


def test_these_are_the_requests_of_schedulers_for_more() -> None:
    """vLLM's numbers for ms-swift's options, by which read_at_the_end knows them."""
    asked = RequestConfig(logprobs=True, top_logprobs=3)
    engine = RolloutEngine.__new__(RolloutEngine)
    vars(engine)["generation_config"] = SamplingParams()
    assert engine._prepare_generation_config(asked).logprobs == 3
    assert engine._prepare_generation_config(RequestConfig(logprobs=True)).logprobs == 0

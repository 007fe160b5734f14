"""Log-probs of sampled tokens: what vLLM's own way appends, and the kernel in Triton's interpreter."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from swift_megatron_grpo.generation.vllm import fast_logprobs
from tests.forking.client import python
from tests.paths import REPOSITORY


def processor(logprobs: Any, num_logprobs: int = 0) -> LogprobsProcessor:
    values: dict[str, Any] = {field.name: None for field in fields(LogprobsProcessor)}
    return LogprobsProcessor(
        **{**values, "logprobs": logprobs, "cumulative_logprob": 0.0, "num_logprobs": num_logprobs}
    )


def tokens(columns: int) -> LogprobsLists:
    """Return three sampled tokens, each with as many columns as the request of the batch that asks for most."""
    random = np.random.default_rng(0)
    shape = (3, columns)
    return LogprobsLists(
        random.integers(0, 9, shape), random.normal(size=shape).astype(np.float32), random.integers(1, 9, 3), None
    )


@pytest.mark.parametrize(("columns", "num_logprobs"), [(1, 0), (4, 0), (3, 2)])
@pytest.mark.parametrize("kind", [FlatLogprobs, list])
def test_the_same_is_appended_as_by_vllm(columns: int, num_logprobs: int, kind: Any) -> None:
    stock = fast_logprobs._append_any
    assert stock.__module__ == LogprobsProcessor.__module__
    expected, found = processor(kind(), num_logprobs), processor(kind(), num_logprobs)
    fast_logprobs.speed_up_logprobs()
    for one in (tokens(columns), tokens(columns)):
        stock(expected, one)
        found._update_sample_logprobs(one)
    assert found.logprobs == expected.logprobs and len(found.logprobs or ()) == 6
    assert found.cumulative_logprob == expected.cumulative_logprob


def test_a_second_call_changes_nothing() -> None:
    fast_logprobs.speed_up_logprobs()
    installed = LogprobsProcessor._update_sample_logprobs
    fast_logprobs.speed_up_logprobs()
    assert LogprobsProcessor._update_sample_logprobs is installed


@pytest.mark.parametrize("module", [name.split(".")[-1] for name in fast_logprobs._MODULES])
def test_vllm_computes_log_probs_in_the_function_that_is_replaced(module: str) -> None:
    """In the text of the files, because the modules need a GPU."""
    folder = REPOSITORY / inspect.getfile(LogprobsProcessor)
    folder = folder.parents[1] / "worker" / "gpu" / "sample"
    source, definition = ((folder / f"{name}.py").read_text() for name in (module, "logprob"))
    [name] = [name for name in fast_logprobs._NAMES if f"def {name}(" in definition]
    assert f"    {name},\n)" in source and source.count(f"= {name}(\n") == 1  # imported by name, and called
    first = "logits: torch.Tensor,\n    num_logprobs: int,\n    sampled_token_ids: torch.Tensor,\n    cu_num_logits: "
    assert f"def {name}(\n    {first}" in definition
    fields = ("logprob_token_ids", "logprobs", "selected_token_ranks", "cu_num_generated_tokens")
    assert LogprobsTensors._fields[:4] == fields


def sampled_logprobs(logits: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel does, which needs a GPU or Triton's interpreter."""
    ranks = (logits >= logits.gather(1, sampled[:, None])).sum(-1)
    return logits.log_softmax(-1).gather(1, sampled[:, None]), ranks


def test_the_kernel_computes_what_is_asked_of_sampled_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is left to vLLM."""
    kernel = pytest.importorskip("swift_megatron_grpo.generation.vllm.logprob_kernel", exc_type=ImportError)
    monkeypatch.setattr(kernel, "sampled_logprobs", sampled_logprobs)
    calls: list[Any] = []

    def compute_topk_logprobs(logits: torch.Tensor, *arguments: Any, **options: Any) -> LogprobsTensors:
        calls.append((arguments, options))
        return LogprobsTensors(logits, logits, logits)

    module = ModuleType("sampler")
    module.compute_topk_logprobs = compute_topk_logprobs  # type: ignore[attr-defined]
    fast_logprobs.install_in(module)
    installed = module.compute_topk_logprobs
    fast_logprobs.install_in(module)
    assert module.compute_topk_logprobs is installed
    logits, asked = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([2])
    found = installed(logits, 0, asked, [0, 1], expanded_idx_mapping=None)
    assert not calls and found.logprob_token_ids.tolist() == [[2]] and found.selected_token_ranks.tolist() == [2]
    assert found.cu_num_generated_tokens == [0, 1]
    installed(logits, 2, asked)
    installed(logits, 0, asked, max_per_req_token_ids=3, expanded_idx_mapping=asked)
    installed(logits, 0, asked, logits_mode=True)
    assert calls == [
        ((2, asked, None), {}),
        ((0, asked, None), {"max_per_req_token_ids": 3, "expanded_idx_mapping": asked}),
        ((0, asked, None), {"logits_mode": True}),
    ]


def run_cases(*arguments: str, **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    pytest.importorskip("triton")
    done = python("-m", "tests.unit.generation.vllm.logprob_kernel_cases", *arguments, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_kernel_agrees_with_fp64_in_the_interpreter() -> None:
    assert run_cases(TRITON_INTERPRET="1") == "5 cases"


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert run_cases("compile", TRITON_CACHE_DIR=str(tmp_path)) == "compiled"

"""Log-probs of sampled tokens: what vLLM's own way appends, and the kernel in Triton's interpreter."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from swift_megatron_grpo.generation.vllm import fast_logprobs
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


def run_cases(*arguments: str, **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.unit.generation.vllm.logprob_kernel_cases", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_kernel_agrees_with_fp64_in_the_interpreter() -> None:
    assert run_cases(TRITON_INTERPRET="1") == "5 cases"


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert run_cases("compile", TRITON_CACHE_DIR=str(tmp_path)) == "compiled"

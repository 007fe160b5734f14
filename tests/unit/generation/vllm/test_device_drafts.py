"""Drafts on the device: the kernels, the texts that are kept, and what verification returns."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest
import torch

from benchmarks.harness.constant_drafts import ConstantSpeculator
from swift_megatron_grpo.generation.vllm.device_drafts import DeviceDrafts, engine_settings
from swift_megatron_grpo.generation.vllm.drafts import ROWS
from swift_megatron_grpo.generation.vllm.kept_texts import KeptTexts
from swift_megatron_grpo.generation.vllm.verification import accepted_rows
from tests.forking.client import python

KERNELS = "tests.unit.generation.vllm.draft_kernel_cases"


def run(module: str, *arguments: str, **environment: str) -> str:
    # In a separate process, because Triton reads TRITON_INTERPRET when it is imported.
    pytest.importorskip("triton")
    done = python("-m", module, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_the_kernels_draft_what_plain_python_does() -> None:
    assert run(KERNELS, TRITON_INTERPRET="1") == "12 cases"


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert run(KERNELS, "compile", TRITON_CACHE_DIR=str(tmp_path)) == "compiled"


@pytest.mark.nightly
def test_completions_are_those_without_drafts_in_fewer_steps() -> None:
    assert "steps of requests without drafts" in run("tests.unit.generation.vllm.second_runner_cases",
                                                     TRITON_INTERPRET="1")  # fmt: skip


@pytest.mark.parametrize("stand_in", [DeviceDrafts, ConstantSpeculator])
def test_it_has_what_vllm_reads_of_a_speculator_and_its_arguments(stand_in: type) -> None:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    assert {name for name in vars(BaseSpeculator) if not name.startswith("_")} <= vars(stand_in).keys()
    names = inspect.signature(BaseSpeculator.propose).parameters
    bound = inspect.signature(vars(stand_in)["propose"]).bind(**{name: name for name in names})
    assert bound.arguments["input_batch"] == "input_batch"


@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("at_once", [1, 3, 16, 64, 65, 1024])
def test_the_number_of_running_requests_decides_how_many_drafts_each_has(most: int, at_once: int) -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    settings = engine_settings(most, at_once)["speculative_config"]
    ranges = settings["num_speculative_tokens_per_batch_size"]
    found = build_dynamic_sd_schedule_lookup(ranges, at_once, settings["num_speculative_tokens"])
    assert found[1:] == [
        max(depth for depth in (0, 1, 3, 7) if depth <= min(most, ROWS // running)) for running in range(1, at_once + 1)
    ]


def test_a_ring_holds_the_newest_texts() -> None:
    rng = random.Random(0)
    forgotten: list[int] = []
    kept = KeptTexts(torch.device("cpu"), forgotten.append, tokens=100, texts=8)
    held: dict[int, list[int]] = {}
    for _ in range(2000):
        forgotten.clear()
        text = [rng.randrange(1000) for _ in range(rng.choice([1, 3, 20, 70, 100]))]
        number = kept.add(text, start=len(text) // 2)
        assert number is not None
        for old in forgotten:
            del held[old]
        assert number not in held
        held[number] = text
        assert list(held) == [number for number, _, _ in kept._held]  # the oldest first: those were forgotten
        for number, tokens in held.items():
            begin, length = int(kept.begins[number]), int(kept.lengths[number])
            assert kept.tokens[begin : begin + length].tolist() == tokens and kept.starts[number] == len(tokens) // 2
    assert kept.add([1] * 101, start=0) is None and held


def test_drafts_are_accepted_up_to_the_first_that_is_not_sampled() -> None:
    rng = random.Random(1)
    for _ in range(200):
        counts = [rng.randint(0, 3) for _ in range(5)]  # drafts of each request
        ends = torch.tensor([0, *torch.tensor([count + 1 for count in counts]).cumsum(0).tolist()])
        samples = torch.tensor([rng.randrange(2) for _ in range(int(ends[-1]))])
        inputs = torch.tensor([rng.choice([-1, 0, 1]) for _ in samples])  # vLLM marks what is no draft with -1
        tokens, found = accepted_rows(samples, inputs, ends, most=3)
        for row, (begin, count) in enumerate(zip(ends.tolist(), counts, strict=False)):
            expected = [int(samples[begin])]
            for at in range(begin + 1, begin + count + 1):
                if inputs[at] != samples[at - 1]:
                    break
                expected.append(int(samples[at]))
            assert tokens[row, : found[row]].tolist() == expected

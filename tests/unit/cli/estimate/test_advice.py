"""Every proposed change of flags fits, and the cheapest ones come first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_megatron_grpo.cli.estimate.activations import Decoder, Tokens, micro_batches_in_flight
from swift_megatron_grpo.cli.estimate.advice import Run, settings_that_fit
from swift_megatron_grpo.cli.estimate.memory import Engine, Training, with_budget
from swift_megatron_grpo.cli.estimate.parameters import tensors_of
from swift_megatron_grpo.runtime.gpus import NAMES, find_gpu
from swift_megatron_grpo.settings.layout import Layout

H100 = find_gpu("H100-80G").memory_bytes
ENGINE = Engine(weight_bytes=16e9, cache_bytes_per_token=1e5, key_heads=8, longest=2560, ranks=1, utilization=0.9)
DECODER = Decoder(layers=36, hidden=4096, queries=4096, keys=1024, ffn=12288, vocabulary=151936, tied=False)


def run(layout: Layout, packed: int = 16384, engine: Engine | None = None) -> Run:
    """Return a full-parameter run of an 8B model."""
    shapes = {"model.embed_tokens.weight": (151936, 4096), "lm_head.weight": (151936, 4096)}
    for layer in range(36):
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (4096, 2 * 4096 + 2 * 1024)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (3 * 12288, 4096)
    return Run(tensors_of(shapes), DECODER, Training(layout, Tokens(packed, packed, packed // 2), 8), engine, 2560)


def changes(run: Run) -> dict[str, Run]:
    return {change.flags: change.run for change in settings_that_fit(run, H100, lambda layout: True)}


def test_a_run_that_does_not_fit_gets_settings_that_do() -> None:
    found = changes(run(Layout(4), engine=replace(ENGINE, utilization=0.4)))
    assert len(found) >= 3
    for flags, changed in found.items():
        assert changed.fits(H100, "train") and changed.fits(H100, "generation"), flags
    assert any("--tuner_type lora" in flags for flags in found)
    assert any("--tensor_model_parallel_size" in flags for flags in found)


def test_a_smaller_budget_is_the_first_and_the_largest_that_fits() -> None:
    sixteen = run(Layout(16), packed=65536)
    flags, changed = next(iter(changes(sixteen).items()))
    assert flags.startswith("--max_tokens_per_micro_batch")
    budget = int(flags.split()[1])
    assert changed.fits(H100, "train")
    assert not replace(sixteen, training=with_budget(sixteen.training, 2 * budget)).fits(H100, "train")


def test_the_smallest_budget_is_that_of_the_longest_sample() -> None:
    flags = next(iter(changes(run(Layout(8), packed=16384))))
    assert flags == "--max_tokens_per_micro_batch 2560"


def test_layouts_that_the_model_does_not_allow_are_left_out() -> None:
    found = settings_that_fit(run(Layout(4)), H100, lambda layout: layout.tensor_model_parallel_size == 1)
    assert found and not any("--tensor_model_parallel_size" in change.flags for change in found)


@pytest.mark.parametrize(
    ("weight_bytes", "flag"), [(8e9, "--vllm_gpu_memory_utilization 0.2"), (16e9, "--offload_model true")]
)
def test_generation_that_does_not_fit_gets_a_smaller_cache_or_offloads(weight_bytes: float, flag: str) -> None:
    """A share of 0.2 is 17 GB, which hold weights of 8 GB, but not of 16 with a sequence."""
    large = run(Layout(16), packed=4096, engine=replace(ENGINE, weight_bytes=weight_bytes))
    assert changes(large) and all(flags.startswith(flag) for flags in changes(large))


def test_a_weight_sync_that_does_not_fit_divides_the_weights_of_vllm() -> None:
    """While they are sent, 16 GB of trained weights and 66 GB of vLLM's are on a GPU."""
    small = run(Layout(16), packed=4096, engine=replace(ENGINE, weight_bytes=66e9))
    offloading = replace(small.training, lora_rank=8, offload_model=True, offload_optimizer=True, offload_grad=True)
    large = replace(small, training=offloading)
    assert large.fits(H100, "generation") and not large.fits(H100, "weight sync")
    found = changes(large)
    divided = found["--vllm_tensor_parallel_size 2"]  # the flags for offloading are set already
    assert divided.fits(H100, "weight sync") and divided.engine is not None and divided.engine.weights == 33e9


@pytest.mark.parametrize(
    ("pipeline", "virtual", "rank", "micro_batches", "expected"),
    [(1, 1, 0, 8, 1), (4, 1, 0, 8, 4), (4, 1, 3, 8, 1), (4, 1, 0, 2, 2), (2, 2, 0, 8, 2.5), (2, 2, 1, 8, 1.5)],
)
def test_micro_batches_between_forward_and_backward(
    pipeline: int, virtual: int, rank: int, micro_batches: int, expected: float
) -> None:
    layout = Layout(pipeline, pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual)
    assert micro_batches_in_flight(layout, rank, micro_batches) == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_is_found_by_its_name(name: str) -> None:
    assert find_gpu(name).name == find_gpu(name.lower().replace("-", "")).name == name


def test_gpus_are_found_by_the_name_that_cuda_reports() -> None:
    assert find_gpu("NVIDIA H100 80GB HBM3").name == "H100-80G"
    assert find_gpu("h200").name == "H200-141G"
    assert find_gpu("NVIDIA GeForce RTX 4090").name == "RTX-4090-24G"
    with pytest.raises(ValueError, match=r"--check_gpu V100: .* use one of A100-40G"):
        find_gpu("V100")

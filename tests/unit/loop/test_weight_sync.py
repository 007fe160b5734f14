"""Verification of weights: checksums of what an engine holds, bounds of log-probs, the check of the first rollout."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swift_megatron_grpo.loop.checks.logprob_check import (
    LogprobGap,
    ShiftedLogprobs,
    check_alignment,
    distortion_warning,
)
from swift_megatron_grpo.settings.config import SamplingConfig
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.transport import checksums
from swift_megatron_grpo.weights.transport.checksums import Checksums, checksum, to_integers
from swift_megatron_grpo.weights.transport.held_weights import TensorSlice
from swift_megatron_grpo.weights.verify import (
    Bound,
    Difference,
    Problem,
    TensorSpec,
    bound_of,
    changed_specs,
    describe,
)
from tests.unit.loop.two_workers import Engine, Model, tensors

BF16 = torch.bfloat16


# ---- checksums


def number(tensor: torch.Tensor, dtype: torch.dtype = BF16, piece: TensorSlice | None = None) -> int:
    return to_integers(checksum(tensor, dtype, piece).view(1))[0]


@pytest.mark.parametrize("chunk", [7, 64, 2**22])
def test_checksums_of_slices_add_up_for_any_slicing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_CHUNK", chunk)
    whole = torch.randn(6, 10, 4).to(BF16)
    for dimension, at in ((0, 2), (1, 7), (2, 1)):
        cut = [whole.narrow(dimension, 0, at), whole.narrow(dimension, at, whole.shape[dimension] - at)]
        slices = [number(p, BF16, TensorSlice(int(p.storage_offset()), tuple(p.shape), p.stride())) for p in cut]
        assert sum(slices) % 2**64 == number(whole)
    transposed = whole.transpose(0, 2)
    piece = TensorSlice(0, tuple(transposed.shape), transposed.stride())
    assert number(transposed.contiguous(), BF16, piece) == number(whole)


def test_every_change_of_a_bit_or_a_place_changes_the_checksum() -> None:
    whole = torch.randn(64, 32).to(BF16)
    before = number(whole)
    assert number(whole[torch.arange(63, -1, -1)]) != before  # the same values at other places
    assert number(-whole) != before
    bits = whole.view(torch.int16)
    for _ in range(200):
        row, column, bit = random.randrange(64), random.randrange(32), 1 << random.randrange(15)
        bits[row, column] ^= bit
        assert number(whole) != before
        bits[row, column] ^= bit
    assert number(whole) == before


def test_wider_types_are_compared_in_the_engines_type() -> None:
    sent = torch.randn(5, 3)
    assert number(sent) == number(sent.to(BF16)) == number(sent.to(BF16).float())
    assert number(sent, torch.float32) != number(sent.to(BF16).float(), torch.float32)
    assert number(torch.tensor(1.5)) == number(torch.tensor([1.5]))
    assert number(torch.empty(0, 4)) == 0 and Checksums(BF16).integers() == []


# ---- what an engine holds. The model loads like vLLM's models: fused, sharded, stacked and padded, by copies


def test_an_engine_that_holds_what_was_sent_has_no_problems() -> None:
    engine, weights = Engine(), tensors()
    engine.load(weights)
    assert engine.problems(weights) == (set(), set())
    weights = tensors()
    engine.load(weights, collect_checksums=False)  # the places are known by now
    assert engine.problems(weights) == (set(), set())


@pytest.mark.parametrize("nbytes", [1, 500, 10_000])
def test_tensors_received_in_buckets_are_traced(nbytes: int) -> None:
    """The tensors of a bucket share a storage, although their types may differ."""
    engine = Engine()
    for _ in range(2):
        weights = {name: tensor.double() if name in ("k", "expert.1") else tensor for name, tensor in tensors().items()}
        engine.load_in_buckets(weights, nbytes)
        assert engine.problems(weights) == (set(), set())
    engine.load_in_buckets(weights | {"k": weights["k"] + 1}, nbytes)
    assert {name for name, _ in engine.problems(weights)[0]} == {"k"}


def test_problems_of_a_later_sync_name_the_tensors() -> None:
    engine, weights = Engine(), tensors()
    engine.load(weights)
    newer = tensors()
    engine.load({name: tensor for name, tensor in newer.items() if name != "k"})
    assert engine.problems(newer)[0] == {("k", "the engine holds other values than were sent")}
    assert engine.problems({name: tensor for name, tensor in newer.items() if name != "k"})[0] == {("k", "not sent")}
    engine.load(newer | {"expert.0": newer["expert.1"], "expert.1": newer["expert.0"]})
    assert {name for name, _ in engine.problems(newer)[0]} == {"expert.0", "expert.1"}
    engine.load(newer)
    engine.models[1].norm.data[3] += 1
    assert engine.problems(newer)[0] == {("norm", "two copies in the engine differ")}


@pytest.mark.parametrize("missing, parameter", [("k", "qk"), ("expert.1", "experts"), ("norm", "norm"), ("o", "o")])
def test_the_first_sync_must_write_every_parameter_of_the_engine(missing: str, parameter: str) -> None:
    engine, weights = Engine(), tensors()
    engine.load({name: tensor for name, tensor in weights.items() if name != missing})
    problems = engine.problems({name: tensor for name, tensor in weights.items() if name != missing})[0]
    assert problems == {(parameter, "parameters of the engine that no sent tensor writes")}
    engine.load(weights)  # traced once more
    assert engine.problems(weights) == (set(), set())


def test_a_sent_tensor_without_a_parameter_is_a_problem() -> None:
    engine, weights = Engine(), tensors() | {"q_bias": torch.zeros(8)}
    engine.load(weights)
    assert engine.problems(weights)[0] == {("q_bias", "sent, but the engine has no parameter for it")}


def test_a_shard_that_no_worker_holds_is_a_problem() -> None:
    engine, weights = Engine(), tensors()
    engine.loaded = engine.loaded[:1]
    engine.models = engine.models[:1]
    engine.load(weights)
    part = "the engine holds only a part of it"
    assert engine.problems(weights)[0] == {(name, part) for name in weights if name not in ("norm", "embedding")}


def test_weights_repacked_for_a_kernel_are_read_before_repacking() -> None:
    def pack(model: Model) -> None:
        model.experts.data.copy_(model.experts.data.flip(1))

    engine, weights = Engine(pack), tensors()
    engine.load(weights)
    assert engine.problems(weights) == (set(), set())
    weights = tensors()
    engine.load(weights)
    assert engine.problems(weights) == (set(), set())
    engine.load(weights | {"expert.0": weights["expert.1"]})
    assert {name for name, _ in engine.problems(weights)[0]} == {"expert.0"}
    engine.load(weights, collect_checksums=False)
    assert engine.problems(weights) == (set(), {"expert.0", "expert.1", "expert.2"})


def test_weights_computed_from_a_tensor_cannot_be_read_back() -> None:
    class Negated(Model):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            super().load_weights(weights)
            self.norm.data.copy_(-self.norm.data.exp())
            self.o.data.mul_(2)
            return set()

    engine, weights = Engine(), tensors()
    engine.models = [Negated(0), Negated(1)]
    engine.loaded = [LoadedWeights(model, torch.float32, "engine 0") for model in engine.models]
    engine.load(weights)
    assert engine.problems(weights) == (set(), {"norm", "o"})


# ---- names, bounds


def test_an_export_with_other_tensors_than_before_is_a_problem() -> None:
    one, other = TensorSpec((2, 2), BF16), TensorSpec((4,), BF16)
    assert changed_specs({"a": one, "b": one}, {"a": one, "b": one}) == []
    problems = changed_specs({"a": one, "b": one, "c": one}, {"b": other, "c": one, "d": one})
    assert [(problem.tensor, problem.what.split(",")[0]) for problem in problems] == [
        ("a", "not sent"),
        ("d", "sent"),
        ("b", "sent in another shape or type than before"),
    ]


def test_a_message_names_only_some_of_many_tensors() -> None:
    problems = [Problem(f"engine {i}", "is off", f"layer.{j}") for i in range(5) for j in range(9)]
    assert describe([*problems, Problem("trainer", "is odd")]) == (
        "trainer: is odd\n"
        "engine 0, engine 1 and 3 more: is off: "
        "layer.0, layer.1, layer.2, layer.3, layer.4, layer.5, layer.6, layer.7 and 1 more"
    )


def test_bounds_apply_to_mean_maximum_and_jumps() -> None:
    bound = Bound(mean=0.1, max=1.0, jump=8.0, floor=0.01)
    assert bound.exceeded(Difference(0.09, 0.9), None) is None
    assert bound.exceeded(Difference(0.11, 0.9), None) and bound.exceeded(Difference(0.01, 1.1), None)
    assert bound.exceeded(Difference(0.05, 0.9), 0.002)  # 25 times the usual difference
    assert bound.exceeded(Difference(0.009, 0.9), 0.0001) is None  # a larger jump, but below the floor
    assert bound.exceeded(Difference.of([0.0, math.nan], [0.0, 0.0]), None)
    assert bound.exceeded(Difference.of([], []), None) and bound.exceeded(Difference.of([1.0], [1.0, 2.0]), None)


def test_bounds_follow_the_precision_in_which_both_sides_compute() -> None:
    cases = [(torch.float32, False, False), (torch.float32, False, True), (torch.bfloat16, False, True),
             (torch.bfloat16, True, True)]  # fmt: skip
    bounds = [bound_of(*case) for case in cases]
    means, most, floors = zip(*((bound.mean, bound.max, bound.floor) for bound in bounds), strict=True)
    assert all(list(values) == sorted(set(values)) for values in (means, most, floors))  # each rounds more coarsely
    assert bound_of(torch.float32, False, on_gpu=True).exceeded(Difference(0.0021, 0.016), None) is None  # an H200's
    assert bound_of(torch.float16, False, True) == bound_of(torch.bfloat16, False, False)


# ---- the first rollout

SAMPLING = SamplingConfig(
    temperature=0.7, top_p=1.0, top_k=-1, repetition_penalty=1.0, max_completion_length=8, stop_words=()
)


def completions(change: Any = lambda values: values) -> LogprobGap:
    source = random.Random(0)
    gaps = []
    for _ in range(8):
        trainer = [-source.expovariate(1.0) for _ in range(20)]
        engine = change([value + source.gauss(0, 0.01) for value in trainer])
        gaps.append(LogprobGap.of(engine, trainer))
    return sum(gaps, LogprobGap())


def not_measured() -> LogprobGap:
    raise AssertionError("the gap at temperature 1 is not needed")


def test_equal_log_probs_pass_without_a_warning() -> None:
    gap = completions()
    assert gap.tokens == 160 and gap.means[0] < 0.02 < gap.means[1]
    check_alignment(gap, rounding=0.01)
    assert distortion_warning(gap, not_measured, SAMPLING, rounding=0.01) is None
    assert distortion_warning(LogprobGap(), not_measured, SAMPLING, rounding=0.01) is None


@pytest.mark.parametrize("shift, side", [(1, "after"), (-1, "before")])
def test_log_probs_shifted_by_one_stop_the_run(shift: int, side: str) -> None:
    gap = completions(lambda values: values[shift:] + values[:shift])
    with pytest.raises(ShiftedLogprobs, match=f"shifted by one.*of the token {side}"):
        check_alignment(gap, rounding=0.01)


def test_unrelated_log_probs_are_not_reported_as_shifted() -> None:
    source = random.Random(1)
    check_alignment(completions(lambda values: [-source.expovariate(1.0) for _ in values]), rounding=0.01)


def test_sampling_flags_that_distort_are_named() -> None:
    from dataclasses import replace

    gap = completions(lambda values: [value + 0.1 for value in values])
    sampling = replace(SAMPLING, top_p=0.9, min_p=0.1, top_k=50, repetition_penalty=1.1)
    check_alignment(gap, rounding=0.01)
    warning = distortion_warning(gap, not_measured, sampling, rounding=0.01) or ""
    assert "0.1 per token" in warning and "(+0.1 with their sign)" in warning
    assert "--top_p 0.9 and --min_p 0.1 and --top_k 50 and --repetition_penalty 1.1" in warning
    assert "use --top_p 1 --min_p 0 --top_k -1 --repetition_penalty 1" in warning
    assert distortion_warning(completions(), not_measured, sampling, rounding=0.01) is None


def test_an_ignored_temperature_is_detected() -> None:
    gap = completions(lambda values: [0.7 * value for value in values])
    warning = distortion_warning(gap, completions, SAMPLING, rounding=0.01) or ""
    assert "vLLM does not apply --temperature 0.7" in warning
    other = distortion_warning(gap, lambda: gap, SAMPLING, rounding=0.01) or ""
    assert "No sampling flag explains it" in other

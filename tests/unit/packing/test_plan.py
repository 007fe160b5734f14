"""The plan keeps the token budget, gives all ranks as many micro batches and equal work, and is computed quickly."""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swift_megatron_grpo.packing.flops import DeltaNets, FlopsModel
from swift_megatron_grpo.packing.plan import Alignment, StepPlan, padded_lengths, plan_by_tokens, refill, regroup
from tests.paths import REPOSITORY
from tests.unit.packing.one_by_one import best_fit_decreasing

PLAIN = Alignment(sequence=1, total=1)
# Forward FLOPs; the smaller the model, the more attention weighs.
SMALL = FlopsModel(per_token=0.88e9, per_token_squared=1.15e5, per_completion_token=0.31e9)  # Qwen3-0.6B
LARGE = FlopsModel(per_token=13.1e9, per_token_squared=2.0e5, per_completion_token=1.09e9)  # Qwen2.5-7B
TOKENS = FlopsModel(per_token=1, per_token_squared=0)
K16 = 16384


def log_normal(number: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [max(1, min(4096, round(700 * math.exp(rng.gauss(0, 0.9))))) for _ in range(number)]


def log_normal_of_total(total: int, seed: int) -> list[int]:
    """Return lengths that add up to exactly `total` tokens."""
    lengths: list[int] = []
    for length in log_normal(total // 200, seed):
        if sum(lengths) + length >= total:
            break
        lengths.append(length)
    return [*lengths, total - sum(lengths)]


def batches_of(plan: StepPlan) -> list[tuple[int, ...]]:
    return [batch for rank in plan.assignment for batch in rank]


def work_of_ranks(plan: StepPlan, lengths: Sequence[int], heads: Sequence[int], cost: FlopsModel) -> list[float]:
    return [sum(cost.of_sequence(lengths[i], heads[i]) for b in rank for i in b) for rank in plan.assignment]


def imbalance(values: Sequence[float]) -> float:
    return max(values) / statistics.mean(values)


# Rules that hold for every step


@dataclass(frozen=True)
class Step:
    lengths: list[int]
    ranks: int
    multiple: int
    budget: int
    align: Alignment

    @property
    def unit(self) -> int:
        return self.ranks * self.multiple

    @property
    def padded(self) -> list[int]:
        return [-(-length // self.align.sequence) * self.align.sequence for length in self.lengths]

    @property
    def plan(self) -> StepPlan:
        return plan_by_tokens(self.lengths, self.ranks, self.budget, SMALL, self.align, self.multiple)

    def tokens(self, batch: Sequence[int]) -> int:
        return sum(padded_lengths([self.lengths[i] for i in batch], self.align))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw any legal step."""
    ranks, multiple = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    align = Alignment.of_layout(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(st.booleans()))
    longest = draw(st.sampled_from([1, 8, 60]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=ranks * multiple, max_size=60))
    least = -(-min(lengths) // align.total) * align.total
    return Step(lengths, ranks, multiple, draw(st.integers(least, least + 150)), align)


@given(steps())
def test_every_sample_is_assigned_once_and_the_largest_micro_batch_first(step: Step) -> None:
    """No micro batch is empty."""
    plan = step.plan
    assert len(plan.assignment) == step.ranks
    assert {len(rank) for rank in plan.assignment} == {plan.num_micro_batches}
    assert plan.num_micro_batches % step.multiple == 0
    assert all(batches_of(plan))
    assert sorted(i for batch in batches_of(plan) for i in batch) == list(range(len(step.lengths)))
    for rank in plan.assignment:
        tokens = [step.tokens(batch) for batch in rank]
        assert tokens == sorted(tokens, reverse=True)


@given(steps())
def test_the_budget_is_kept_and_samples_that_exceed_it_are_listed(step: Step) -> None:
    plan = step.plan
    too_large = [batch for batch in batches_of(plan) if step.tokens(batch) > step.budget]
    assert plan.over_budget == tuple(sorted(i for batch in too_large for i in batch))
    if len(step.lengths) % step.unit == 0:
        assert all(len(batch) == 1 for batch in too_large)


@given(steps())
def test_micro_batches_are_as_few_as_a_tight_packing_needs(step: Step) -> None:
    needed = best_fit_decreasing(step.padded, step.budget // step.align.total * step.align.total)
    most = len(step.lengths) // step.unit
    assert len(batches_of(step.plan)) == min(-(-needed // step.unit), most) * step.unit


@given(steps(), st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_only_their_indices(step: Step, rng: random.Random) -> None:
    # Lengths are padded here, because samples that differ only before padding may swap places.
    step = replace(step, lengths=step.padded)
    shuffled = replace(step, lengths=rng.sample(step.lengths, len(step.lengths)))

    def shape(of: Step) -> list[list[list[int]]]:
        return [[sorted(of.lengths[i] for i in batch) for batch in rank] for rank in of.plan.assignment]

    assert shape(step) == shape(shuffled)


# The goals: equal work, full micro batches


@pytest.mark.parametrize("cost", [SMALL, LARGE], ids=["0.6B", "7B"])
@pytest.mark.parametrize("budget", [4096, 8192, K16, 2 * K16])
def test_ranks_have_equal_work(budget: int, cost: FlopsModel) -> None:
    for seed in range(20):
        lengths = log_normal(256, seed)
        heads = [length * (3 + i % 7) // 10 for i, length in enumerate(lengths)]
        plan = plan_by_tokens(lengths, 4, budget, cost, PLAIN, completion_lengths=heads)
        assert imbalance(work_of_ranks(plan, lengths, heads, cost)) <= 1.03, seed


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_micro_batches_are_filled(ranks: int) -> None:
    for seed in range(5):
        lengths = log_normal(4096, seed)
        plan = plan_by_tokens(lengths, ranks, K16, SMALL, PLAIN)
        assert sum(lengths) / (K16 * len(batches_of(plan))) >= 0.97, seed


@pytest.mark.parametrize("share", [0.97, 0.98, 0.99])
def test_256_samples_fill_the_micro_batches_that_four_ranks_can_share(share: float) -> None:
    for seed in range(20):
        lengths = log_normal_of_total(int(share * 16 * K16), seed)
        plan = plan_by_tokens(lengths, 4, K16, SMALL, PLAIN)
        assert plan.num_micro_batches == 4, (seed, len(lengths))
        assert imbalance(work_of_ranks(plan, lengths, lengths, SMALL)) <= 1.03, seed


def test_256_samples_need_the_fewest_micro_batches_and_stall_no_pipeline() -> None:
    for seed in range(40):
        lengths = log_normal(256, seed)
        plan = plan_by_tokens(lengths, 4, K16, SMALL, PLAIN)
        assert plan.num_micro_batches == -(-sum(lengths) // (4 * K16)), seed
        for rank in plan.assignment:
            work = [sum(SMALL.of_sequence(lengths[i], lengths[i]) for i in batch) for batch in rank]
            assert imbalance(work) <= 1.05, seed


def test_the_work_of_a_long_sequence_includes_its_attention() -> None:
    attention_only = FlopsModel(per_token=0, per_token_squared=1)
    plan = plan_by_tokens([8, 4, 4, 4, 4], 2, 16, attention_only, PLAIN)
    assert sorted(batches_of(plan)) == [(0,), (1, 2, 3, 4)]


def test_the_work_of_the_head_counts_completions_only() -> None:
    head_only = FlopsModel(per_token=0, per_token_squared=0, per_completion_token=1)
    heads = [9, 9, 1, 1]
    plan = plan_by_tokens([10, 10, 10, 10], 2, 40, head_only, PLAIN, completion_lengths=heads)
    assert work_of_ranks(plan, [10] * 4, heads, head_only) == [10, 10]


@pytest.mark.parametrize(
    ("lengths", "ranks", "budget", "sizes"),
    [
        pytest.param([1] * 100, 4, 5, [5] * 20, id="all of length one"),
        pytest.param([7], 1, 7, [1], id="one sample"),
        pytest.param([1000] * 64, 4, 4000, [4] * 16, id="all equal"),
        pytest.param([512] * 8, 2, 512, [1] * 8, id="lengths equal to the budget"),
    ],
)
def test_extremes(lengths: list[int], ranks: int, budget: int, sizes: list[int]) -> None:
    plan = plan_by_tokens(lengths, ranks, budget, SMALL, PLAIN)
    assert [len(batch) for batch in batches_of(plan)] == sizes
    assert plan.over_budget == ()


def test_a_sample_over_budget_is_a_micro_batch_and_its_rank_gets_less_work() -> None:
    lengths = [50, *[10] * 15]
    plan = plan_by_tokens(lengths, 2, 40, TOKENS, PLAIN)
    assert plan.over_budget == (0,)
    assert (0,) in batches_of(plan)
    assert work_of_ranks(plan, lengths, lengths, TOKENS) == [100, 100]


def test_too_few_small_samples_are_spread_so_that_no_rank_is_idle() -> None:
    plan = plan_by_tokens([5, 5, 5, 5, 5], 2, 1000, SMALL, PLAIN, micro_batch_multiple=2)
    assert sorted(len(batch) for batch in batches_of(plan)) == [1, 1, 1, 2]
    assert plan.over_budget == ()


def test_samples_share_beyond_the_budget_only_if_a_micro_batch_were_empty() -> None:
    plan = plan_by_tokens([9, 8, 7, 6, 6], 2, 10, SMALL, PLAIN)  # five micro batches for two ranks
    assert plan.num_micro_batches == 2
    assert plan.over_budget == (3, 4)


@pytest.mark.parametrize("budget", [-1, 0])
def test_a_budget_below_one_token_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match="holds no token; use a budget of 16384"):
        plan_by_tokens([80, 60, 70], 1, budget, SMALL, PLAIN)


@pytest.mark.parametrize("budget", [1, 59])
def test_a_budget_below_every_sample_gives_each_sample_its_own_micro_batch(budget: int) -> None:
    plan = plan_by_tokens([80, 60, 70], 1, budget, SMALL, Alignment(sequence=4, total=8))
    assert sorted(batches_of(plan)) == [(0,), (1,), (2,)]
    assert plan.over_budget == (0, 1, 2)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=40),
    dp=st.sampled_from([1, 2, 4]),
    budget=st.integers(40, 200),
    infer_budget=st.integers(40, 400),
    multiple=st.sampled_from([1, 2]),
)
def test_another_budget_for_inference_moves_no_sample_to_another_rank(
    lengths: list[int], dp: int, budget: int, infer_budget: int, multiple: int
) -> None:
    assume(len(lengths) >= dp * multiple)
    plan = plan_by_tokens(lengths, dp, budget, SMALL, PLAIN, multiple)

    def fill(samples: Sequence[int], number: int) -> StepPlan:
        return plan_by_tokens([lengths[i] for i in samples], 1, infer_budget, SMALL, PLAIN, number)

    filled = refill(plan, fill, multiple)
    assert [sorted(rank) for rank in filled.samples_of_ranks()] == [sorted(rank) for rank in plan.samples_of_ranks()]
    assert {len(rank) for rank in filled.assignment} == {filled.num_micro_batches}
    assert filled.num_micro_batches % multiple == 0 and all(batches_of(filled))
    smallest = min(map(len, filled.samples_of_ranks()))
    for batch in batches_of(filled):
        fits = sum(lengths[i] for i in batch) <= infer_budget or set(batch) <= set(filled.over_budget)
        assert fits or filled.num_micro_batches == smallest // multiple * multiple  # a rank has no more samples


@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    dp=st.sampled_from([1, 2, 4]),
    size=st.integers(1, 9),
    multiple=st.sampled_from([1, 2]),
)
def test_another_micro_batch_size_for_inference_moves_no_sample(
    lengths: list[int], dp: int, size: int, multiple: int
) -> None:
    plan = plan_by_tokens(lengths, dp, 100, SMALL, PLAIN, multiple)
    grouped = regroup(plan, size, multiple)
    assert grouped.samples_of_ranks() == plan.samples_of_ranks()
    assert {len(rank) for rank in grouped.assignment} == {grouped.num_micro_batches}
    assert grouped.num_micro_batches % multiple == 0 and all(batches_of(grouped))
    enough = min(map(len, plan.samples_of_ranks())) >= -(-max(map(len, plan.samples_of_ranks())) // size) * multiple
    assert not enough or max(map(len, batches_of(grouped))) <= size


@pytest.mark.parametrize(
    ("lengths", "multiple", "message"),
    [
        ([5] * 3, 1, r"3 completions .* 4 data-parallel ranks: set --global_batch_size to at least 4,"),
        ([5] * 7, 2, r"7 completions .* 4 data-parallel ranks times 2 micro batches .* at least 8,"),
        ([], 1, r"0 completions"),
        ([5, 5, 0, 5], 1, r"completion 2 of the step has no tokens"),
    ],
)
def test_samples_that_cannot_be_planned_are_refused(lengths: list[int], multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_by_tokens(lengths, 4, 100, SMALL, PLAIN, multiple)


def test_the_same_plan_in_every_process_without_torch() -> None:
    program = (
        "import sys, hashlib\n"
        "from swift_megatron_grpo.packing.flops import FlopsModel\n"
        "from swift_megatron_grpo.packing.plan import Alignment, plan_by_tokens\n"
        "lengths = [1 + (i * 7919) % 4000 for i in range(500)]\n"
        "plan = plan_by_tokens(lengths, 4, 16384, FlopsModel(1e9, 1e5, 3e8), Alignment(4, 8), 2)\n"
        "print(hashlib.sha256(repr(plan).encode()).hexdigest(), 'torch' in sys.modules)\n"
    )
    outputs = {
        subprocess.check_output(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=REPOSITORY, text=True
        )
        for seed in ("0", "1", "12345")
    }
    assert len(outputs) == 1
    assert outputs.pop().split()[1:] == ["False"]


@pytest.mark.alone
@pytest.mark.parametrize("budget", [4096, K16])
@pytest.mark.parametrize("ranks", [1, 8])
def test_4096_samples_are_planned_quickly(ranks: int, budget: int) -> None:
    """The bound on an idle machine is 50 ms; the test allows six times that."""
    lengths = log_normal(4096, seed=0)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        plan_by_tokens(lengths, ranks, budget, SMALL, PLAIN)
        seconds.append(time.perf_counter() - start)
    print(f"4096 samples, {ranks} ranks, budget {budget}: median {1e3 * statistics.median(seconds):.1f} ms")
    assert statistics.median(seconds) < 0.3


def test_flops_of_one_layer_by_hand() -> None:
    layers = partial(FlopsModel.of_transformer, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=10)
    plain = layers(num_layers=1, gated_linear_unit=False)
    assert plain == FlopsModel(per_token=2 * (4 * 64 + 2 * 128), per_token_squared=2 * 8, per_completion_token=160)
    grouped = layers(num_layers=3, num_query_groups=1, kv_channels=6)
    assert grouped == FlopsModel(3 * 2 * (8 * (12 + 6 + 6 + 12) + 3 * 128), 3 * 2 * 12, 160)
    assert plain.of_sequence(3, 2) == 3 * 1024 + 9 * 16 + 2 * 160
    mixture = layers(num_layers=3, expert_layers=2, experts_width=4)
    assert mixture == FlopsModel(2 * (3 * 4 * 64 + 8 * (16 + 2 * 4) * 3), 3 * 2 * 8, 160)


def test_flops_of_delta_nets_by_hand() -> None:
    """Layers with a delta net have no term that grows with the square of the length."""
    layers = partial(FlopsModel.of_transformer, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=10)
    nets = DeltaNets(
        layers=3, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=5, linear_value_head_dim=7
    )
    one_net = 8 * (2 * 10 + 2 * 28 + 2 * 4) + 28 * 8 + 4 * 4 * 5 * 7  # projections, output, rule
    mixed = layers(num_layers=4, delta_nets=nets)
    assert mixed == FlopsModel(2 * (4 * 64 + 3 * one_net + 4 * 3 * 128), 2 * 8, 160)
    assert layers(num_layers=4).per_token_squared == 4 * mixed.per_token_squared

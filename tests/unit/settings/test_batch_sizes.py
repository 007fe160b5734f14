"""The batch arithmetic, its errors, and the suggestions of these errors, which must be valid."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_megatron_grpo.settings.batches import BatchError, Batches, BatchSizes
from swift_megatron_grpo.settings.layout import Layout

SIZES = [field.name for field in fields(Layout)]


def plan(**settings: Any) -> BatchSizes:
    """Resolve sizes of a layout and of batches; sizes that are left out are small."""
    given = {"world_size": 1, "micro_batch_size": 1, "global_batch_size": 16, "num_generations": 8} | settings
    layout = Layout(**{name: given.pop(name) for name in SIZES if name in given})
    left_out = {"generation_batch_size": None, "steps_per_generation": None, "max_tokens_per_micro_batch": None}
    return Batches(**({"num_iterations": 1} | left_out | given)).sizes(layout)


def shown(sizes: BatchSizes) -> dict[str, str]:
    """Return the numbers of the table, by their names."""
    return dict(re.findall(r"^  (\S+(?: \S+)*) +([\d.]+)   \S", "\n".join(sizes.table()), re.MULTILINE))


def error_of(**settings: Any) -> BatchError:
    with pytest.raises(BatchError) as caught:
        plan(**settings)
    return caught.value


def test_the_worked_example_of_siirl() -> None:
    resolved = plan(
        world_size=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        micro_batch_size=8,
        global_batch_size=16 * 8,
        generation_batch_size=128 * 8,
    )
    assert resolved.layout.data_parallel == 1
    assert resolved.generation_batch_size == 1024
    assert resolved.steps_per_generation == 8
    assert (resolved.rollout_prompts, resolved.train_prompts) == (128, 16)
    assert shown(resolved)["accumulation steps"] == shown(resolved)["prompts per DP group"] == "16"
    assert resolved.notes() == []


@pytest.mark.parametrize(
    ("typed", "generation", "steps"),
    [
        ({}, 16, 1),
        ({"steps_per_generation": 3}, 48, 3),
        ({"generation_batch_size": 64}, 64, 4),
        ({"generation_batch_size": 64, "steps_per_generation": 4}, 64, 4),
    ],
)
def test_sizes_that_are_left_out_are_filled_in(typed: dict[str, int], generation: int, steps: int) -> None:
    resolved = plan(**typed)
    assert (resolved.generation_batch_size, resolved.steps_per_generation) == (generation, steps)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            {"global_batch_size": 50, "micro_batch_size": 16},
            "generation_batch_size (50) must be divisible by num_generations (8); use --global_batch_size 48 or 64",
        ),
        (
            {"global_batch_size": 48, "micro_batch_size": 32},
            "global batch size (48) is not divisible by micro batch size (32) times data parallel size (1); "
            "use --global_batch_size 32 or 64",
        ),
        (
            {"generation_batch_size": 48, "steps_per_generation": 2},
            "generation_batch_size (48) must equal global_batch_size (16) * steps_per_generation (2) = 32; "
            "use --generation_batch_size 32, or --steps_per_generation 3",
        ),
        (
            {"generation_batch_size": 40},
            "generation_batch_size (40) must be divisible by global_batch_size (16); "
            "use --generation_batch_size 32 or 48",
        ),
        (
            {"steps_per_generation": 0},
            "steps_per_generation must be > 0, got 0; use --steps_per_generation 1",
        ),
        (
            {"generation_batch_size": 32, "num_generations": 6},
            "generation_batch_size (32) must be divisible by num_generations (6); use --generation_batch_size 48",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size must be > 0, got 0; use --micro_batch_size 1"),
        ({"global_batch_size": -16}, "global_batch_size must be > 0, got -16; use --global_batch_size 8"),
        ({"num_generations": 0}, "num_generations must be > 0, got 0; use --num_generations 2"),
        (
            {"world_size": 6, "tensor_model_parallel_size": 4, "global_batch_size": 24},
            "world size (6) must be divisible by tensor_model_parallel_size (4) * pipeline_model_parallel_size (1) * "
            "context_parallel_size (1) = 4; use a world size of 4 or 8, or --tensor_model_parallel_size 2",
        ),
        (
            {"world_size": 3, "global_batch_size": 32, "generation_batch_size": 32},
            "global batch size (32) is not divisible by micro batch size (1) times data parallel size (3); "
            "use --global_batch_size 24 --generation_batch_size 24, "
            "or --global_batch_size 48 --generation_batch_size 48",
        ),
    ],
)
def test_an_error_states_the_fault_and_valid_sizes(typed: dict[str, int], message: str) -> None:
    assert str(error_of(**typed)) == message


@pytest.mark.parametrize(
    ("typed", "phrase"),
    [
        ({"world_size": 4, "global_batch_size": 16}, "num_rollout_prompt (2) = generation_batch_size (16) // num_gen"),
        ({"micro_batch_size": 4}, "Per-device rollout prompt count (2) = (generation_batch_size (16) // num_generati"),
        (
            {"world_size": 3, "tensor_model_parallel_size": 3, "global_batch_size": 8},
            "generation_batch_size (8) is not divisible by the world size (3)",
        ),
    ],
)
def test_sizes_that_only_ms_swift_refuses_are_accepted_with_one_note(typed: dict[str, int], phrase: str) -> None:
    (note,) = plan(**typed).notes()
    assert phrase in note
    assert "\n" not in note


def test_a_step_may_train_part_of_a_group() -> None:
    resolved = plan(global_batch_size=4, steps_per_generation=2)
    assert (resolved.rollout_prompts, resolved.train_prompts) == (1, 1)
    assert shown(resolved)["prompts per DP group"] == "0.5"


def test_the_table_shows_every_number_of_the_plan() -> None:
    resolved = plan(
        world_size=8,
        tensor_model_parallel_size=2,
        micro_batch_size=3,
        global_batch_size=36,
        steps_per_generation=2,
        num_generations=24,
    )
    assert shown(resolved) == {
        "data parallel size": "4",
        "micro batch": "3",
        "accumulation steps": "3",
        "global batch": "36",
        "steps per generation": "2",
        "generation batch": "72",
        "completions per prompt": "24",
        "rollout prompts": "3",
        "train prompts": "1.5",
        "prompts per DP group": "0.375",
    }


layouts = st.fixed_dictionaries(
    {
        "world_size": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
        "tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4, 8]),
        "pipeline_model_parallel_size": st.sampled_from([1, 2, 4]),
        "context_parallel_size": st.sampled_from([1, 2]),
    }
)
sizes = st.fixed_dictionaries(
    {
        "micro_batch_size": st.integers(-1, 12),
        "global_batch_size": st.integers(-1, 100),
        "num_generations": st.integers(0, 16),
        "generation_batch_size": st.none() | st.integers(-1, 200),
        "steps_per_generation": st.none() | st.integers(-1, 5),
    }
)


def attempt(typed: dict[str, Any]) -> BatchSizes | BatchError:
    try:
        return plan(**typed)
    except BatchError as error:
        return error


@settings(max_examples=400, deadline=None)
@given(layouts, sizes)
def test_a_plan_satisfies_every_formula(layout: dict[str, int], typed: dict[str, Any]) -> None:
    outcome = attempt(layout | typed)
    if isinstance(outcome, BatchError):
        return
    model_parallel = math.prod(size for name, size in layout.items() if name != "world_size")
    dp = outcome.layout.data_parallel
    assert dp * model_parallel == layout["world_size"]
    numbers = shown(outcome)
    assert outcome.global_batch_size == outcome.micro_batch_size * dp * float(numbers["accumulation steps"])
    assert outcome.generation_batch_size == outcome.global_batch_size * outcome.steps_per_generation
    assert outcome.rollout_prompts * outcome.num_generations == outcome.generation_batch_size
    prompts = outcome.global_batch_size / outcome.num_generations / dp
    assert float(numbers["prompts per DP group"]) == pytest.approx(prompts, rel=1e-5)
    assert typed["generation_batch_size"] in (None, outcome.generation_batch_size)
    assert typed["steps_per_generation"] in (None, outcome.steps_per_generation)
    assert len(outcome.notes()) <= 1


@settings(max_examples=400, deadline=None)
@given(layouts, sizes)
def test_every_suggestion_of_an_error_is_valid(layout: dict[str, int], typed: dict[str, Any]) -> None:
    error = attempt(layout | typed)
    if isinstance(error, BatchSizes):
        return
    about_layout = str(error).startswith("world size")
    if not about_layout:
        assert error.suggestions
    for suggestion in error.suggestions:
        assert all(f"{value}" in str(error) for value in suggestion.values())
        outcome = attempt(layout | typed | suggestion)
        if about_layout and isinstance(outcome, BatchError):
            # The batch sizes fit none of the layouts that were tried: a separate error, which a new world size reveals.
            assert not str(outcome).startswith("world size")
        else:
            assert isinstance(outcome, BatchSizes), f"{typed} in {layout}: {error}, but {suggestion}: {outcome}"


def ms_swift_resolves(layout: dict[str, int], typed: dict[str, Any]) -> tuple[int, int] | None:
    """Return ms-swift's generation_batch_size and steps_per_generation, or None if its own functions refuse."""
    from swift.megatron.arguments import MegatronArguments as Stock

    model_parallel = math.prod(size for name, size in layout.items() if name != "world_size")
    dp = layout["world_size"] // model_parallel
    group, micro = typed["num_generations"], typed["micro_batch_size"]
    if layout["world_size"] % model_parallel or min(group, micro, typed["global_batch_size"]) < 1:
        return None  # ms-swift fails elsewhere, or divides by zero
    if typed["global_batch_size"] % (micro * dp):
        return None  # MegatronArguments._init_distributed
    try:
        resolved: tuple[int, int] = Stock.resolve_generation_batch_size(
            typed["generation_batch_size"], typed["steps_per_generation"], typed["global_batch_size"], group
        )
        Stock.validate_batch_dp_alignment(resolved[0], group, dp, micro, layout["world_size"])
    except ValueError:
        return None
    return resolved if resolved[0] > 0 else None


@settings(max_examples=800, deadline=None)
@given(layouts, sizes)
def test_sizes_that_ms_swift_accepts_are_accepted(layout: dict[str, int], typed: dict[str, Any]) -> None:
    """Sizes that only ms-swift refuses get a note."""
    stock, resolved = ms_swift_resolves(layout, typed), attempt(layout | typed)
    if stock is not None:
        assert isinstance(resolved, BatchSizes), str(resolved)
        assert (resolved.generation_batch_size, resolved.steps_per_generation) == stock
    if isinstance(resolved, BatchSizes):
        # ms-swift checks the last condition later, with an assertion
        runs_there = stock is not None and resolved.generation_batch_size % resolved.layout.world_size == 0
        assert (resolved.notes() == []) == runs_there


def test_suggestions_are_found_at_once_for_sizes_of_a_billion() -> None:
    """It once tried every value up to the least common multiple, which took hours."""
    assert {"num_generations": 8} in error_of(num_generations=1000000007).suggestions
    assert error_of(global_batch_size=1000000007, world_size=2).suggestions
    assert error_of(tensor_model_parallel_size=1000000007, world_size=2).suggestions
    assert error_of(micro_batch_size=1000000007).suggestions

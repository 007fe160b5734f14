"""Passes of a tiny policy: log-probs, gradients, and what happens when a pass runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from swift_megatron_grpo.packing.collate import MicroBatch
from swift_megatron_grpo.training.loss import TokenOutput
from swift_megatron_grpo.training.passes import Output, Passes
from swift_megatron_grpo.training.planner import EngineSettings
from swift_megatron_grpo.types import Sample
from tests.fakes.one_rank import VOCABULARY, TinyPolicy, megatron_on_one_rank, tiny_policy

PROMPT = 4
LONGEST = 11


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyPolicy]:
    with megatron_on_one_rank():
        yield tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def memory(policy: TinyPolicy) -> Iterator[Callable[[int], list[int]]]:
    """Give the policy memory for micro batches of so many tokens; return the list of those that it runs."""
    hooks = []

    def limit(tokens: int) -> list[int]:
        seen: list[int] = []

        def check(_: Any, args: Any, inputs: dict[str, Any]) -> None:
            seen.append(inputs["input_ids"].numel())
            if seen[-1] > tokens:
                raise torch.OutOfMemoryError(f"no memory for {seen[-1]} tokens")

        hooks.append(policy.megatron.register_forward_pre_hook(check, with_kwargs=True))
        return seen

    yield limit
    for hook in hooks:
        hook.remove()


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    lengths = range(LONGEST - 3, LONGEST + 1)
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [Sample(ids, [False] * PROMPT + [True] * (len(ids) - PROMPT), advantage=1.0) for ids in tokens]


def passes(policy: TinyPolicy, **settings: Any) -> Passes:
    return Passes([policy.megatron], EngineSettings(temperature=2.0, **settings))


def expected(policy: TinyPolicy, sample: Sample) -> torch.Tensor:
    """Return log-probs and entropies of the completion by transformers, [2, c]."""
    with torch.no_grad():
        logits = policy.transformers(torch.tensor([sample.tokens])).logits[0, PROMPT - 1 : -1] / 2.0
    logp = logits.log_softmax(-1)
    chosen = logp.gather(1, torch.tensor(sample.tokens[PROMPT:])[:, None])[:, 0]
    return torch.stack([chosen, -(logp.exp() * logp).sum(-1)])


def assert_exact(policy: TinyPolicy, values: dict[int, Any]) -> None:
    assert sorted(values) == list(range(len(samples())))
    for index, sample in enumerate(samples()):
        torch.testing.assert_close(torch.tensor(values[index].logprobs), expected(policy, sample)[0])


@pytest.mark.parametrize("settings", [{"max_tokens": 24}, {"micro_batch_size": 2}], ids=str)
def test_log_probs_and_entropies_are_those_of_transformers(policy: TinyPolicy, settings: dict[str, int]) -> None:
    outputs: tuple[Output, ...] = ("logprob", "entropy")
    values = passes(policy, **settings).infer(samples(), outputs)
    assert_exact(policy, values)
    for index, sample in enumerate(samples()):
        torch.testing.assert_close(torch.tensor(values[index].entropies), expected(policy, sample)[1])


def test_inference_is_in_evaluation_mode_and_keeps_the_mode_before(policy: TinyPolicy) -> None:
    modes: list[bool] = []
    hook = policy.megatron.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    for training in (True, False):
        policy.megatron.train(training)
        passes(policy, max_tokens=64).infer(samples())
        assert policy.megatron.training is training
    hook.remove()
    assert modes == [False, False]


@pytest.mark.parametrize("outputs", [("entropy",), ("logprob", "logits"), ()])
def test_other_outputs_are_refused(policy: TinyPolicy, outputs: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be"):
        passes(policy).infer(samples(), outputs)


def test_inference_continues_with_half_the_budget_and_keeps_it(
    policy: TinyPolicy, memory: Callable[[int], list[int]]
) -> None:
    seen = memory(15)
    ours = passes(policy, max_tokens=64, infer_max_tokens=48)
    assert_exact(policy, ours.infer(samples()))
    assert ours.settings.infer_max_tokens == 12 and ours.settings.max_tokens == 64
    assert len([tokens for tokens in seen if tokens > 15]) == 2  # with budgets of 48 and of 24
    first = len(seen)
    assert_exact(policy, ours.infer(samples()))
    assert max(seen[first:]) <= 12


def test_a_sample_that_needs_more_memory_ends_inference_with_advice(
    policy: TinyPolicy, memory: Callable[[int], list[int]]
) -> None:
    memory(LONGEST - 1)
    ours = passes(policy, max_tokens=64)
    told = f"a log-prob pass: --infer_max_tokens_per_micro_batch {LONGEST} cannot be lower: the longest completion has"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        ours.infer(samples())
    assert ours.settings.infer_max_tokens == LONGEST  # no micro batch can have less


@pytest.mark.parametrize(
    ("settings", "train", "advice"),
    [
        ({"max_tokens": 64}, True, "the train phase: lower --max_tokens_per_micro_batch from 64 to 32, or --recompute"),
        ({"micro_batch_size": 4}, True, "the train phase: lower --micro_batch_size from 4 to 2, or --recompute"),
        ({"micro_batch_size": 4}, False, r"a log-prob pass: lower --micro_batch_size from 4 to 2\. "),
        (
            {"micro_batch_size": 4, "infer_micro_batch_size": 2},
            False,
            r"a log-prob pass: lower --infer_batch_size from 2 to 1\. ",
        ),
    ],
)
def test_a_pass_without_memory_names_the_flag_and_a_value(
    policy: TinyPolicy, memory: Callable[[int], list[int]], settings: dict[str, int], train: bool, advice: str
) -> None:
    memory(0)
    ours = passes(policy, **settings)
    with pytest.raises(torch.OutOfMemoryError, match=advice):
        ours.run(samples(), ours.plan(samples()), ("logprob",), negative_log_likelihood, train)


def test_the_budget_of_training_is_halved_down_to_the_longest_sample(policy: TinyPolicy) -> None:
    ours = passes(policy, max_tokens=40)
    budgets = []
    while ours.lower_budget(samples(), train=True):
        budgets.append(ours.settings.max_tokens)
    assert budgets == [20, LONGEST]
    assert not passes(policy, micro_batch_size=4).lower_budget(samples(), train=True)


def test_gradients_do_not_depend_on_micro_batches(policy: TinyPolicy) -> None:
    whole = gradients(policy, max_tokens=64)
    assert all(gradient.abs().sum() > 0 for gradient in whole.values())
    for settings in ({"max_tokens": LONGEST}, {"micro_batch_size": 2}):
        for name, gradient in gradients(policy, **settings).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)


def gradients(policy: TinyPolicy, **settings: int) -> dict[str, torch.Tensor]:
    ours = passes(policy, **settings)
    plan = ours.plan(samples())
    policy.megatron.zero_grad()
    kept, routers = ours.run(samples(), plan, ("logprob",), negative_log_likelihood, train=True)
    assert len(kept) == plan.num_micro_batches and routers is None
    named = policy.megatron.named_parameters()
    return {name: parameter.grad * plan.num_micro_batches for name, parameter in named if parameter.grad is not None}


def negative_log_likelihood(batch: MicroBatch, output: TokenOutput) -> tuple[torch.Tensor, int]:
    return -output.logprobs.sum(), len(batch.indices)


def test_every_rank_needs_a_complete_micro_batch(policy: TinyPolicy) -> None:
    assert passes(policy, micro_batch_size=3).fewest_samples == 3
    assert passes(policy, micro_batch_size=3, max_tokens=64).fewest_samples == 1
    with pytest.raises(ValueError, match="multiple of 3"):
        passes(policy, micro_batch_size=3).plan(samples())


def test_prompts_are_shared_where_that_is_worth_it(policy: TinyPolicy) -> None:
    group = [Sample([1] * 30 + [token, 3], [False] * 30 + [True] * 2, advantage=1.0, group=0) for token in range(4, 8)]
    repeated = passes(policy, max_tokens=256)
    shared = passes(policy, max_tokens=256, share_prompts_from=0.0)
    assert shared.reason_to_repeat_prompts is None and shared.plan(group).share_prompts
    assert not repeated.plan(group).share_prompts
    assert shared.flops(group, shared.plan(group)) < 0.5 * repeated.flops(group, repeated.plan(group))
    one = shared.infer(group)
    other = repeated.infer(group)
    for index in range(len(group)):
        torch.testing.assert_close(torch.tensor(one[index].logprobs), torch.tensor(other[index].logprobs))

"""Completions that stay where they are train the same micro batches as completions that all ranks have.

Real messages over gloo, outlines, plans and packing; the ranks are processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forking.client import run_code

PROGRAM = """
import json, random, sys
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from swift_megatron_grpo.generation.interface import Share
from swift_megatron_grpo.grading.columns import Rewards
from swift_megatron_grpo.grading.graded import GradedRollouts, Outcomes
from swift_megatron_grpo.grading.scores import Scores
from swift_megatron_grpo.loop.bodies import Bodies
from swift_megatron_grpo.loop.samples import samples_of
from swift_megatron_grpo.packing.collate import collate, count
from swift_megatron_grpo.packing.flops import FlopsModel
from swift_megatron_grpo.packing.bundles import SampleWork, plan_within
from swift_megatron_grpo.packing.plan import Alignment
from swift_megatron_grpo.packing.segments import shared_with_previous
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.types import Prompt, Rollout, TokenSequence

folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
coordinator = Coordinator(timedelta(seconds=120))
group = 2
total = size * 4
COST = FlopsModel.of_transformer(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
                                 num_query_groups=2, kv_channels=16, vocab_size=500)

def rollout(index):
    rng = random.Random(index)
    prompt = random.Random(index // group)
    ids = [prompt.randrange(500) for _ in range(5 + prompt.randrange(9))]
    tokens = rng.randrange(1, 60)
    masked = rng.random() < 0.2
    sampled = [place > tokens // 3 for place in range(tokens)] if masked and tokens > 4 else None
    rest = {}
    if case["several"] and rng.random() < 0.2:  # such a completion is known to all
        rest["earlier"] = (TokenSequence(ids, [1, 2], [-0.5, -0.25]),)
    count = tokens if sampled is None else sum(sampled)
    return Rollout(Prompt(str(index // group), {}), ids, [rng.randrange(500) for _ in range(tokens)],
                   [-rng.random() for _ in range(count)], f"text {index}", rng.choice(("stop", "length")), index % 3,
                   sampled=sampled, infos={"num_turns": 1} if index % 5 == 0 else {}, **rest)

def graded_of(rollouts):
    rewards = Rewards.of([None if i % 11 == 0 else float(i % 7) for i in range(total)])
    scores = Scores.of([[float(i % 7)] for i in range(total)], 1)
    return GradedRollouts(rollouts, Outcomes.of(rollouts, scores, rewards), np.arange(total) / 8)

def batches(graded, fetch):
    samples = samples_of(graded, group, overlong_filter=True, image_reader=None)
    if case["engine"]:
        for sample in samples:
            sample.old_logprobs = sample.rollout_logprobs
    shared = shared_with_previous(samples) if case["shared"] else [0] * len(samples)
    lengths, trained = np.array([s.length for s in samples]), np.array([s.trained for s in samples])
    work = SampleWork(lengths, trained, None, COST, np.array(shared))
    plan = plan_within(128, work, size, Alignment(1, 1), 1, 0.01)
    mine = fetch(samples, plan)
    step = count(mine)
    return plan, [collate(mine, indices, step, Alignment(1, 1), 0, 1, torch.device("cpu"),
                          share_prompts=plan.share_prompts) for indices in plan.assignment[rank]]

# rank 0 has all, as with servers, or each rank has a slice, in which a group may be cut
indices = (list(range(total)) if rank == 0 else []) if case["served"] else Share(rank, size, True).pick(range(total))
finished = {index: rollout(index) for index in indices}
everywhere = {index: one for part in coordinator.all_gather(finished) for index, one in part.items()}
old_plan, old = batches(graded_of([everywhere[i] for i in range(total)]), lambda samples, plan: samples)

bodies = Bodies(coordinator)
prompts = [everywhere[index].prompt for index in range(0, total, group)]
read = bodies.read(coordinator.all_gather(bodies.outlines(finished)), prompts, group)
outlines = read.rollouts
assert read.indices.tolist() == list(range(total))  # groups are neighbours
groups = [range(i, i + group) for i in range(0, total, group)]
graders = [Share(other, size, True).pick(groups) for other in range(size)]
bodies.move_to(outlines, read.graders(group, size))
for of_group in graders[rank]:
    assert [bodies.whole(outlines[i]) for i in of_group] == [everywhere[i] for i in of_group]
graded = graded_of(outlines)
for ours, theirs in zip(graded, graded_of([everywhere[i] for i in range(total)])):
    assert (ours.rewards, ours.reward, ours.advantage) == (theirs.rewards, theirs.reward, theirs.advantage)
    ours, theirs = ours.rollout, theirs.rollout
    assert (ours.infos, ours.length, ours.truncated) == (theirs.infos, theirs.length, theirs.truncated)
    assert ours.spans_of_weights == theirs.spans_of_weights and ours.prompt == theirs.prompt
def fetch(samples, plan):
    if case["differs"] and rank == 1:
        plan = replace(plan, assignment=plan.assignment[::-1])
    return bodies.fetch(range(size), samples, plan)

try:
    plan, new = batches(graded, fetch)
except RuntimeError as error:
    folder.joinpath(f"{rank}.txt").write_text(json.dumps(str(error)))
    dist.barrier()
    sys.exit()
assert plan == old_plan, (plan, old_plan)
moved = sum(one.body is not None and one.body in bodies._held for one in outlines)

def compare(ours, theirs, path):
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), path
    elif hasattr(ours, "__dataclass_fields__"):
        for field in fields(ours):
            compare(getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}")
    else:
        assert ours == theirs, path

assert len(new) == len(old) > 0
for place, (ours, theirs) in enumerate(zip(new, old)):
    compare(ours, theirs, f"micro batch {place}")
whole = bodies.whole_on(size - 1, graded)
assert rank != size - 1 or [one.rollout for one in whole] == [everywhere[i] for i in range(total)]
del graded, outlines, read, ours, plan, new, whole
folder.joinpath(f"{rank}.txt").write_text(json.dumps([moved, len(bodies._held)]))
dist.barrier()
"""


def run(folder: Path, ranks: int, **case: bool) -> list[Any]:
    complete = {"served": False, "shared": False, "engine": False, "several": False, "differs": False, **case}
    run_code("upstream", PROGRAM, str(folder), json.dumps(complete), ranks=ranks)
    return [json.loads((folder / f"{rank}.txt").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.nightly)])
def test_many_ranks_train_what_they_train_if_all_have_everything(tmp_path: Path, ranks: int) -> None:
    """No rank has more than it generated, graded and trains, and nothing is left after the step."""
    held = run(tmp_path, ranks, shared=True)
    assert all(4 <= of_rank <= 24 for of_rank, _ in held), held
    assert all(left == 0 for _, left in held)


def test_ranks_that_plan_differently_all_end(tmp_path: Path) -> None:
    errors = run(tmp_path, 3, differs=True)
    assert len(set(errors)) == 1 and errors[0].startswith("ranks 0 and 1 have planned different micro batches")


@pytest.mark.parametrize(
    "case",
    [{"served": True}, {"served": True, "shared": True, "engine": True}, {"engine": True}, {"several": True}],
    ids=lambda case: "-".join(case),
)
def test_what_servers_generate_moves_to_those_who_grade_and_train_it(tmp_path: Path, case: dict[str, bool]) -> None:
    """The ranks compare what they train with what they would with all tokens, and nothing is left after the step."""
    assert all(left == 0 for _, left in run(tmp_path, 3, **case))

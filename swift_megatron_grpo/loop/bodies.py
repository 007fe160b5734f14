"""The tokens of completions, which stay on the rank that has them until another one grades or trains them.

Every rank knows the outline of every completion: integers, from which all ranks compute the same plan. The tokens,
their log-probs and the text move by that plan, directly from their home to a rank that needs them. There is no
directory: the home knows to whom it has sent what, and who has received it.

A completion of several sequences, with experts or with messages is known to all ranks as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from swift_megatron_grpo.loop.finished import Finished
from swift_megatron_grpo.packing.bins import Ints, Objects
from swift_megatron_grpo.packing.completions import REASONS, Facts, OutlinedRollouts, Rare
from swift_megatron_grpo.packing.outlines import Outline, changed
from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.types import Body, Graded, Prompt, Rollout, Sample

if TYPE_CHECKING:  # benchmarks do without Megatron
    from swift_megatron_grpo.runtime.parallel import Coordinator
    from swift_megatron_grpo.training.passes import Passes

_COLUMNS = ("index", "prompt", "completion", "sampled", "first", "version", "has_logprobs", "truncated")
_INTEGERS = ("prompt", "completion", "sampled", "first", "version")
_ROW = np.dtype([(name, "<i4") for name in _COLUMNS])


class Outlines(NamedTuple):
    """The part of the completions that one rank has finished which all ranks know."""

    rows: bytes  # of _ROW
    rare: dict[int, Rare]  # by index: what is not in the row
    whole: dict[int, Rollout]  # by index: completions of which all ranks have the tokens


class Bodies:
    """The tokens that this rank holds. Every rank calls every method, with the same arguments unless they say more."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._rank = coordinator, coordinator.rank
        self._held: WeakKeyDictionary[Body, Rollout] = WeakKeyDictionary()  # gone with the last outline
        self._sent: WeakKeyDictionary[Body, set[int]] = WeakKeyDictionary()  # of which this rank is the home: receivers
        self._finished: dict[int, Rollout] = {}  # by index, between `outlines` and `read`
        self._agreed = -1  # digest of the last plan that all ranks have found to be the same

    def serve(self, passes: Passes) -> None:
        """Bring the tokens of samples to the ranks that these passes run them on."""
        dp_ranks = self._coordinator.all_gather(passes.parallel.dp_rank)
        passes.fetch = partial(self.fetch, dp_ranks)

    # ---- outlines

    def outlines(self, finished: Mapping[int, Rollout]) -> Outlines:
        """Return what all ranks need of the completions that this rank has finished; this rank keeps the rest."""
        whole = {index: rollout for index, rollout in finished.items() if not _can_stay(rollout)}
        self._finished = {index: rollout for index, rollout in finished.items() if index not in whole}
        rows = np.zeros(len(self._finished), _ROW)
        rare: dict[int, Rare] = {}
        for place, (index, rollout) in enumerate(self._finished.items()):
            sampled = rollout.sampled
            count = len(rollout.completion_ids) if sampled is None else sum(sampled)
            first = 0 if sampled is None else sampled.index(True) if count else len(sampled)
            rows[place] = (index, len(rollout.prompt_ids), len(rollout.completion_ids), count, first,
                           rollout.weights_version, rollout.logprobs is not None, rollout.truncated)  # fmt: skip
            if rollout.finish_reason not in REASONS or rollout.infos or rollout.spans is not None:
                rare[index] = (rollout.finish_reason, rollout.infos, rollout.spans)
        return Outlines(rows.tobytes(), rare, whole)

    def read(self, gathered: Sequence[Outlines], prompts: Sequence[Prompt], group_size: int) -> Finished:
        """Return the completions of all ranks, in the order of ranks, most of them without tokens."""
        rows = np.frombuffer(b"".join(data for data, _, _ in gathered), _ROW)
        indices = rows["index"].astype(np.int64)
        homes = np.repeat(np.arange(len(gathered)), [len(data) // _ROW.itemsize for data, _, _ in gathered])
        facts = Facts(
            **{name: rows[name].astype(np.int64) for name in _INTEGERS},
            home=homes,
            has_logprobs=rows["has_logprobs"] != 0,
            truncated=rows["truncated"] != 0,
            asked=np.fromiter(prompts, np.object_, len(prompts))[indices // group_size],
            rare=_of_indices(indices, [rare for _, rare, _ in gathered if rare]),
        )
        rollouts = OutlinedRollouts(facts)
        own = (homes == self._rank).nonzero()[0].tolist()
        for place, rollout in zip(own, self._finished.values(), strict=True):
            body = rollouts[place].body
            assert body is not None
            self._held[body] = rollout
        self._finished = {}
        if not any(whole for _, _, whole in gathered):
            return Finished(indices, rollouts)
        every = dict(zip(indices.tolist(), rollouts, strict=True))
        for _, _, whole in gathered:
            every |= {index: replace(one, prompt=prompts[index // group_size]) for index, one in whole.items()}
        return Finished.of(dict(sorted(every.items())))  # the members of a group stay neighbours

    # ---- moves

    def move(self, wanted: Iterable[tuple[Body | None, int]]) -> None:
        """Send tokens to the ranks that want them. None, and what this rank neither has nor wants, is left out."""
        outgoing: dict[int, list[Rollout]] = defaultdict(list)
        incoming: dict[int, list[Body]] = defaultdict(list)
        for body, rank in wanted:
            if body is None or rank == body.home:
                continue
            if body.home == self._rank:
                receivers = self._sent.setdefault(body, set())
                if rank not in receivers:
                    receivers.add(rank)
                    outgoing[rank].append(self._held[body])
            elif rank == self._rank and body not in self._held:
                incoming[body.home].append(body)
        for home, rollouts in self._coordinator.exchange(outgoing, list(incoming)).items():
            self._held.update(zip(incoming[home], rollouts, strict=True))

    def move_to(self, rollouts: Sequence[Rollout], ranks: Ints) -> None:
        """Send the tokens of each completion to a rank. Bodies are made of those that this rank sends or receives."""
        places = range(len(rollouts))
        if isinstance(rollouts, OutlinedRollouts):
            homes = rollouts.facts.home
            moves = (homes != ranks) & ((homes == self._rank) | (ranks == self._rank))
            places = moves.nonzero()[0].tolist()
        self.move((rollouts[i].body, int(ranks[i])) for i in places)

    def whole(self, rollout: Rollout) -> Rollout:
        """Return a completion that this rank holds, with its tokens and the row of its prompt."""
        return rollout if rollout.body is None else replace(self._held[rollout.body], prompt=rollout.prompt)

    def whole_on(self, rank: int, graded: Sequence[Graded]) -> Sequence[Graded]:
        """Return completions with their tokens on one rank, which writes them, and as they are on all others."""
        self.move((completion.rollout.body, rank) for completion in graded)
        if rank != self._rank:
            return graded
        return [replace(completion, rollout=self.whole(completion.rollout)) for completion in graded]

    # ---- samples

    def fetch(self, dp_ranks: Sequence[int], samples: Sequence[Sample], plan: StepPlan) -> Sequence[Sample]:
        """Return the samples, those that this rank runs with their tokens. `dp_ranks`: of every rank, in a layout."""
        outline = Outline.of(samples)
        if (outline.homes < 0).all():
            return samples
        of_samples = plan.rank_of_samples()
        self._check_same(outline, of_samples)
        receivers: dict[int, list[int]] = defaultdict(list)
        for rank, dp_rank in enumerate(dp_ranks):
            receivers[dp_rank].append(rank)
        comes_or_goes = (outline.homes == self._rank) | (of_samples == dp_ranks[self._rank])
        places = comes_or_goes.nonzero()[0].tolist()
        self.move((samples[i].body, rank) for i in places for rank in receivers[int(of_samples[i])])
        return changed(samples, self.with_tokens)

    def _check_same(self, outline: Outline, of_samples: Ints) -> None:
        """Raise on all ranks unless they have computed the same plan from the same outlines.

        A rank that runs its samples again, because it ran out of memory, is alone, and all have agreed on them before.
        """
        integers = np.stack([outline.lengths, outline.trained, of_samples]).astype("<i4")
        number = int.from_bytes(blake2b(integers.tobytes(), digest_size=7).digest(), "big")
        if number == self._agreed:
            return
        if self._coordinator.max(number) != -self._coordinator.max(-number):
            found = self._coordinator.all_gather(number)
            other = next(rank for rank, of_rank in enumerate(found) if of_rank != found[0])
            raise RuntimeError(
                f"ranks 0 and {other} have planned different micro batches from the lengths of the same completions; "
                "run the same versions of Python and of this package on all machines"
            )
        self._agreed = number

    def with_tokens(self, sample: Sample) -> Sample:
        """Return a sample with its tokens, if this rank holds them."""
        if sample.body is None or sample.body not in self._held:
            return sample
        body = self._held[sample.body]
        sequence = body.sequences[0]
        engine = None if sample.rollout_logprobs is None else [] if sample.is_left_out else sequence.logprobs
        from_engine = sample.old_logprobs is not None and len(sample.old_logprobs) < sample.trained
        return replace(
            sample,
            tokens=sequence.tokens,
            completion_mask=[False] * len(sequence.prompt_ids)
            + [not sample.is_left_out and token for token in sequence.sampled_mask],
            rollout_logprobs=engine,
            old_logprobs=engine if from_engine else sample.old_logprobs,
        )


def _of_indices(indices: Ints, parts: Sequence[Mapping[int, Rare]]) -> Objects:
    """Return the rare values of completions with these indices; None: it has none."""
    values = np.full(len(indices), None)
    if parts:
        places = dict(zip(indices.tolist(), range(len(indices)), strict=True))
        for part in parts:
            for index, rare in part.items():
                values[places[index]] = rare
    return values


def _can_stay(rollout: Rollout) -> bool:
    return not rollout.earlier and rollout.routed_experts is None and rollout.messages is None

"""The tokens of completions, which stay on the rank that has them until another one grades or trains them.

Every rank knows the outline of every completion: integers, from which all ranks compute the same plan. The tokens,
their log-probs and the text move by that plan, directly from a rank that holds them to one that needs them. There is no
directory: who holds what follows from the moves before, which all ranks know.

A completion of several sequences, with experts or with messages is known to all ranks as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from swift_megatron_grpo.packing.plan import StepPlan
from swift_megatron_grpo.types import Body, Graded, Prompt, Rollout, Sample, Span

if TYPE_CHECKING:  # benchmarks do without Megatron
    from swift_megatron_grpo.runtime.parallel import Coordinator
    from swift_megatron_grpo.training.passes import Passes

_ROW = np.dtype([("index", "<i4"), ("prompt", "<i4"), ("completion", "<i4"), ("sampled", "<i4"), ("first", "<i4"),
                 ("version", "<i4"), ("has_logprobs", "<i4")])  # fmt: skip
Small = tuple[str, dict[str, Any], list[Span] | None]  # finish reason, infos, spans


class Outlines(NamedTuple):
    """The part of the completions that one rank has finished which all ranks know."""

    rows: bytes  # of _ROW
    small: list[Small]  # in the same order
    whole: dict[int, Rollout]  # by index: completions of which all ranks have the tokens


class Bodies:
    """The tokens that this rank holds. Every rank calls every method, with the same arguments unless they say more."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._rank = coordinator, coordinator.rank
        self._held: WeakKeyDictionary[Body, Rollout] = WeakKeyDictionary()  # gone with the last outline
        self._finished: dict[int, Rollout] = {}  # by index, between `outlines` and `read`

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
        small: list[Small] = []
        for place, (index, rollout) in enumerate(self._finished.items()):
            sampled = rollout.sampled
            count = len(rollout.completion_ids) if sampled is None else sum(sampled)
            first = 0 if sampled is None else sampled.index(True) if count else len(sampled)
            rows[place] = (index, len(rollout.prompt_ids), len(rollout.completion_ids), count, first,
                           rollout.weights_version, rollout.logprobs is not None)  # fmt: skip
            small.append((rollout.finish_reason, rollout.infos, rollout.spans))
        return Outlines(rows.tobytes(), small, whole)

    def read(self, gathered: Sequence[Outlines], prompts: Sequence[Prompt], group_size: int) -> dict[int, Rollout]:
        """Return the completions of all ranks by index, in the order of ranks, most of them without tokens."""
        finished: dict[int, Rollout] = {}
        for rank, (data, of_rank, whole) in enumerate(gathered):
            for row, small in zip(np.frombuffer(data, _ROW).tolist(), of_rank, strict=True):
                index, prompt, completion, sampled, first, version, has_logprobs = row
                reason, infos, spans = small
                asked = prompts[index // group_size]
                body = Body(prompt, completion, sampled, first, {rank}, asked.prompt_id)
                if rank == self._rank:
                    self._held[body] = self._finished[index]
                logprobs: list[float] | None = [] if has_logprobs else None
                finished[index] = Rollout(
                    asked, [], [], logprobs, "", reason, version, infos=infos, spans=spans, body=body
                )
            if whole:
                finished |= {index: replace(one, prompt=prompts[index // group_size]) for index, one in whole.items()}
                finished = dict(sorted(finished.items()))  # the members of a group stay neighbours
        self._finished = {}
        return finished

    # ---- moves

    def move(self, wanted: Iterable[tuple[Body | None, int]]) -> None:
        """Send tokens to the ranks that want them; None, and who holds them already, is left out."""
        sends: dict[tuple[int, int], list[Body]] = defaultdict(list)  # by sender and receiver
        for body, rank in wanted:
            if body is not None and rank not in body.holders:
                sends[min(body.holders), rank].append(body)
        for (_, receiver), moved in sends.items():
            for body in moved:
                body.holders.add(receiver)
        outgoing = {
            receiver: [self._held[body] for body in moved]
            for (sender, receiver), moved in sends.items()
            if sender == self._rank
        }
        senders = [sender for sender, receiver in sends if receiver == self._rank]
        for sender, rollouts in self._coordinator.exchange(outgoing, senders).items():
            for body, rollout in zip(sends[sender, self._rank], rollouts, strict=True):
                self._held[body] = rollout

    def whole(self, rollout: Rollout) -> Rollout:
        """Return a completion that this rank holds, with its tokens and the row of its prompt."""
        return rollout if rollout.body is None else replace(self._held[rollout.body], prompt=rollout.prompt)

    def whole_on(self, rank: int, graded: Sequence[Graded]) -> list[Graded]:
        """Return completions with their tokens on one rank, which writes them, and as they are on all others."""
        self.move((completion.rollout.body, rank) for completion in graded)
        if rank != self._rank:
            return list(graded)
        return [replace(completion, rollout=self.whole(completion.rollout)) for completion in graded]

    # ---- samples

    def fetch(self, dp_ranks: Sequence[int], samples: Sequence[Sample], plan: StepPlan) -> Sequence[Sample]:
        """Return the samples, those that this rank runs with their tokens. `dp_ranks`: of every rank, in a layout."""
        if all(sample.body is None for sample in samples):
            return samples
        of_ranks = plan.samples_of_ranks()
        missing = [
            (samples[i].body, rank)
            for rank, dp_rank in enumerate(dp_ranks)
            for i in of_ranks[dp_rank]
            if (body := samples[i].body) is not None and rank not in body.holders
        ]
        if missing:  # not in a second try of this rank alone, after it ran out of memory: its samples are the same
            self._check_same(of_ranks, samples)
            self.move(missing)
        result = list(samples)
        for i in of_ranks[dp_ranks[self._rank]]:
            result[i] = self.with_tokens(samples[i])
        return result

    def _check_same(self, of_ranks: Sequence[Sequence[int]], samples: Sequence[Sample]) -> None:
        """Raise on all ranks unless they have computed the same plan from the same outlines."""
        lengths = np.array([(sample.length, sample.trained) for sample in samples], "<i4")
        order = np.array([i for of_rank in of_ranks for i in (*of_rank, -1)], "<i4")
        digest = blake2b(lengths.tobytes() + order.tobytes(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        if self._coordinator.max(number) != -self._coordinator.max(-number):
            found = self._coordinator.all_gather(number)
            other = next(rank for rank, of_rank in enumerate(found) if of_rank != found[0])
            raise RuntimeError(
                f"ranks 0 and {other} have planned different micro batches from the lengths of the same completions; "
                "run the same versions of Python and of this package on all machines"
            )

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


def _can_stay(rollout: Rollout) -> bool:
    return not rollout.earlier and rollout.routed_experts is None and rollout.messages is None

"""Teachers behind servers: rank 0 asks for the log-probs of all completions, and all ranks get them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from swift_megatron_grpo.generation.remote.teacher import TeacherServer, score_together
from swift_megatron_grpo.runtime.parallel import Coordinator
from swift_megatron_grpo.types import Sample, TokenValues


@dataclass(frozen=True)
class ServedTeacher:
    """Every rank calls every method."""

    servers: Mapping[str | None, TeacherServer]  # by tag; several tags may have one. A teacher alone has None
    coordinator: Coordinator

    def infer(self, samples: Sequence[Sample]) -> dict[int, TokenValues]:
        """Return the log-probs of all samples; those without trained tokens are not sent."""
        trained = {index: sample for index, sample in enumerate(samples) if any(sample.completion_mask)}

        def ask() -> list[list[float]]:
            if self.coordinator.rank != 0:
                return []
            scored = score_together([(self.servers[sample.tag], sample.tokens) for sample in trained.values()])
            masks = [sample.completion_mask[1:] for sample in trained.values()]  # a first token is never trained
            return [list(compress(one.logprobs, mask)) for one, mask in zip(scored, masks, strict=True)]

        found = self.coordinator.all_gather_or_raise(ask, "asking the teacher's server")[0]
        values = dict.fromkeys(range(len(samples)), TokenValues([], None))
        return values | {index: TokenValues(of_one, None) for index, of_one in zip(trained, found, strict=True)}

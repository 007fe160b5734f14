"""The engine of a trainer in a process that generates a round for each number on its standard input.

    python -m benchmarks.harness.drafts.engine MODEL JOB TEXTS

With drafts, requests sample the tokens of texts.py instead of their own: the model's sample is computed and not used.
Without drafts, they have the same lengths. Each round prints its seconds, and those by the number of running requests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.harness.generation_arms import GenerationJob, colocated_engine
from swift_megatron_grpo.cli.simulate_drafts.command import LEAST_BAND

from .texts import Sizes, Work, draw

WARM_UP = "lognormal:16:0.5:32"
ROOM = 32  # places behind the longest text, of drafts that are too many


@dataclass(frozen=True, slots=True)
class Texts:
    """Names the texts that the requests of all rounds sample."""

    sizes: Sizes
    right: float

    def of_round(self, number: int) -> Work:
        """Return the requests of a round; those of round 0 are short, to warm up."""
        return draw(self.sizes if number else replace(self.sizes, lengths=WARM_UP), self.right, number)

    def as_json(self) -> str:
        return json.dumps({"sizes": asdict(self.sizes), "right": self.right})

    @classmethod
    def from_json(cls, text: str) -> Texts:
        values = json.loads(text)
        return cls(Sizes(**values["sizes"]), values["right"])


class Forced:
    """Stands in for the sampling of seeded rows: the seed is the request's place, and its text says the token."""

    def __init__(self, second_runner: bool) -> None:
        self._tokens = torch.empty(0)
        if second_runner:
            from vllm.v1.worker.gpu.sample import gumbel, sampler

            self._stock = gumbel.gumbel_sample
            for module in (gumbel, sampler):  # rows of drafts, and others
                vars(module)["gumbel_sample"] = self.sample_on_device
        else:
            from swift_megatron_grpo.generation.vllm import position_noise

            self._stock = position_noise.noisy_argmax
            vars(position_noise)["noisy_argmax"] = self.sample

    def begin(self, work: Work) -> None:
        texts = [[*one.prompt, *one.tokens] for one in work.completions]
        table = np.zeros((len(texts), max(map(len, texts)) + ROOM), np.int64)
        for row, text in zip(table, texts, strict=True):
            row[: len(text)] = text
        self._tokens = torch.from_numpy(table).to("cuda" if torch.cuda.is_available() else "cpu")

    def sample(self, logits: torch.Tensor, seeds: Any, positions: Any) -> torch.Tensor:
        sampled = self._stock(logits, seeds, positions)
        places = torch.from_numpy(np.stack([seeds, positions])).to(sampled.device, non_blocking=True)
        return self._tokens[places[0], places[1]].to(sampled.dtype)

    def sample_on_device(
        self, logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
        positions: torch.Tensor, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Stand in for the second model runner's function, whose positions are those of the tokens before."""
        sampled = self._stock(logits, slots, temperature, seeds, positions, **options)
        return self._tokens[seeds[slots], positions + 1].to(sampled.dtype)


class Watch:
    """Asked after every step, as what gives up a generation is: adds up times by the number of running requests."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.bands: defaultdict[int, dict[str, float]] = defaultdict(lambda: {"steps": 0, "seconds": 0.0, "tokens": 0})
        self._running, self._missing = 0, 0
        self._at = time.perf_counter()

    def check(self) -> None:
        scheduler, now = self._scheduler, time.perf_counter()
        running = len(scheduler.running)
        requests = [*scheduler.running, *scheduler.waiting]
        missing = sum(request.max_tokens - request.num_output_tokens for request in requests)
        if self._running and not scheduler.waiting:  # the first steps decode prompts
            band = self.bands[max(LEAST_BAND, 1 << (self._running - 1).bit_length())]
            band["steps"] += 1
            band["seconds"] += now - self._at
            band["tokens"] += self._missing - missing
        self._running, self._missing, self._at = running, missing, now


def generate(engine: Any, work: Work, forced: Forced | None) -> dict[str, Any]:
    """Complete all requests at once, and return what it took."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from swift_megatron_grpo.generation.local.engine import run_batch

    vllm = engine._engine.engine
    if forced is not None:
        forced.begin(work)
        engine.drafts.remember((one.prompt, one.tokens) for one in work.earlier)
    requests = [
        ({"input_ids": list(one.prompt)},
         SamplingParams(temperature=1.0, seed=seed, max_tokens=len(one.tokens), ignore_eos=True, detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY))
        for seed, one in enumerate(work.completions)
    ]  # fmt: skip
    watch: Any = Watch(vllm.engine_core.engine_core.scheduler)
    began, cpu = time.perf_counter(), time.process_time()
    outputs = run_batch(engine._engine, requests, watch)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    completions = [list(output.outputs[0].token_ids) for output in outputs]
    tokens = sum(map(len, completions))
    assert tokens == sum(len(one.tokens) for one in work.completions)
    result = {"seconds": seconds, "cpu_seconds": cpu, "tokens": tokens, "bands": watch.bands}
    if forced is None:
        return result
    assert completions == [one.tokens for one in work.completions], "requests have not sampled the tokens of the texts"
    engine.drafts.end_generation(tokens)
    counts = engine.take_draft_counts()
    return result | {"steps_of_requests": counts.steps, "verified": counts.drafted, "accepted": counts.accepted}


def main() -> None:
    model, job, texts = sys.argv[1], GenerationJob(**json.loads(sys.argv[2])), Texts.from_json(sys.argv[3])
    engine = colocated_engine(model, job)
    forced = Forced(second_runner=torch.cuda.is_available()) if job.drafts else None
    print("READY", flush=True)
    for line in sys.stdin:
        print("ROUND " + json.dumps(generate(engine, texts.of_round(int(line)), forced)), flush=True)
    engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()

"""An external plugin for tests: the difference of the first log-probs to the engine's, with its experts and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swift_megatron_grpo.loop.checks.logprob_check import LogprobCheck
from swift_megatron_grpo.loop.samples import without_routing
from swift_megatron_grpo.types import Sample

check = LogprobCheck.check


def check_and_measure(self: LogprobCheck, samples: Sequence[Sample], rounding: float) -> None:
    replayed = self._measure_gap(self.passes, samples)
    chosen = self._measure_gap(self.passes, without_routing(samples))
    report = {"tokens": replayed.tokens, "replayed": replayed.means[0], "chosen": chosen.means[0]}
    if self.coordinator.rank == 0:
        Path("gap.json").write_text(json.dumps(report))
    check(self, samples, rounding)


LogprobCheck.check = check_and_measure  # type: ignore[method-assign]

"""The comparison of one sender of weights with two, on small weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.paths import REPOSITORY
from tests.support.machines import needs_namespaces


@pytest.mark.nightly
@needs_namespaces
def test_two_senders_take_turns_with_one_over_slow_links() -> None:
    words = ["-m", "benchmarks.bench_gateways", "--rounds", "1", "--megabytes", "64", "--mbit", "400"]
    printed = subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    one, two = map(json.loads, printed.stdout.splitlines())
    assert (one["senders"], two["senders"]) == (1, 2)
    assert 4 < one["seconds"] < 8 and two["seconds"] < 0.7 * one["seconds"]  # 256 MiB at 50 MB/s

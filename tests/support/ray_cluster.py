"""A small cluster of Ray on this machine, without a dashboard, for tests of one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

from tests.paths import IMPORT_PATH

# Ray would write a token into the home folder, report usage, and miss a machine for half a minute.
_QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": IMPORT_PATH,
          "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
          "RAY_health_check_failure_threshold": "3"}  # fmt: skip
_SMALL = {"object_store_memory": 100 * 2**20, "include_dashboard": False}


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Cluster]:
    """Start machines with so many CPUs for Ray, whatever this one has, and connect this process."""
    before = dict(os.environ)
    os.environ.update(_QUIET)
    cluster = Cluster()
    try:
        for number in cpus:
            cluster.add_node(num_cpus=number, **_SMALL)
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

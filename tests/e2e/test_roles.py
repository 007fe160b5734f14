"""Real ranks and a real server of one file, on Ray or on two machines, train what they train by hand."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.forking.client import free_port
from tests.support.runs import (
    PLUGINS,
    REWARDS,
    Finished,
    command_line,
    grpo_flags,
    megatron_rlhf,
    read_json_lines,
    values_of,
)
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
# a constant rate, because one of the runs is longer
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true",
         "--lr_decay_style", "constant", "--no_save_optim", "false", "--no_save_rng", "false"]  # fmt: skip
PLACES = ["--external_plugins", str(REWARDS), str(PLUGINS / "writes_place.py")]


def write_roles(file: Path, flags: list[str], **more: object) -> None:
    """Write flags of a trainer by role: two ranks, and a server that has vLLM's."""
    common = values_of(flags)
    of_engine = {name: common.pop(name) for name in list(common) if name.startswith("vllm_")}
    roles = {"train": {"gpus": 2}, "rollout": {"gpus": 1, **of_engine}}
    file.write_text(yaml.safe_dump({**common, **roles, **more}))


@pytest.fixture(scope="module")
def plain(folder: Path, dense: Path, dataset: Path) -> Finished:
    server = RolloutServer(dense, folder / "server.txt").start()
    flags = [*FLAGS, "--vllm_mode", "server", "--vllm_server_base_url", server.url]
    run = megatron_rlhf(dense, dataset, folder / "plain", 2, flags, {API_KEY_VARIABLE: KEY})
    server.stop()
    assert run.code == 0, run.output[-4000:]
    return run


def assert_same_weights(plain: Finished, other: Path) -> None:
    first, second = (load_file(each / "checkpoint-2" / "model.safetensors") for each in (plain.folder, other))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@pytest.mark.nightly
def test_ranks_on_ray_train_the_same_and_end_with_one_line(
    folder: Path, dense: Path, dataset: Path, plain: Finished
) -> None:
    """Two steps as without Ray. After them a rank is killed, which ends the run everywhere."""
    pytest.importorskip("ray")
    from tests.support.ray_cluster import ray_cluster

    on_ray, config, killed = folder / "ray", folder / "roles.yaml", []
    write_roles(config, grpo_flags(dense, dataset, on_ray, [*FLAGS, *PLACES, "--train_iters", "500"]), use_ray=True)

    def kill_a_rank(line: str) -> None:
        log = on_ray / "logging.jsonl"
        if not killed and log.exists() and len(read_json_lines(log)) >= 3:
            killed.append(json.loads((folder / "rank1").read_text())["pid"])
            os.kill(killed[0], signal.SIGKILL)

    with ray_cluster(3) as cluster:
        environment = {**os.environ, "PLACES": str(folder), "RAY_ADDRESS": cluster.address}
        address = cluster.address.split(":")[0]
        run = command_line(["megatron", "rlhf", "--config", str(config)], on_ray, environment, on_line=kill_a_rank)

    assert run.code == 1, run.output[-4000:]
    ranks = [json.loads((folder / f"rank{rank}").read_text()) for rank in (0, 1)]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks] == [
        (str(rank), str(rank), "2", "2") for rank in (0, 1)
    ]
    assert {(rank["MASTER_ADDR"], rank["GROUP_RANK"]) for rank in ranks} == {(address, "0")}
    for process in (*ranks, json.loads((folder / "server").read_text())):
        assert not Path(f"/proc/{process['pid']}").exists()
    assert_same_weights(plain, on_ray)
    assert re.fullmatch(
        r"swift_megatron_grpo: machine 0 \([\d.]+\): rank 1 has ended: killed by signal 9\. All ranks and servers are "
        rf"ended; the newest whole checkpoint is {on_ray}/checkpoint-\d+\. To continue, on these or other machines, "
        r"use the same command with --resume auto",
        run.output.splitlines()[-1],
    )
    assert "(Ranks pid=" in run.output and "(RolloutServer pid=" in run.output
    assert "ChildFailedError" not in run.output


@pytest.mark.thorough
@pytest.mark.nightly
def test_two_machines_without_ray_train_the_same(folder: Path, dense: Path, dataset: Path, plain: Finished) -> None:
    """The command of each machine is the same: the first one has the ranks, the second one the server."""
    runs, config = folder / "machines", folder / "machines.yaml"
    write_roles(config, grpo_flags(dense, dataset, runs, FLAGS), nnodes=1)
    of_job = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), API_KEY_VARIABLE: KEY}

    def machine(number: int) -> Finished:
        output = folder / f"machine{number}"
        command = ["megatron", "rlhf", "--config", str(config)]
        return command_line(command, output, {**of_job, "NODE_RANK": str(number)})

    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(machine, (0, 1)))
    for run in ended:
        assert run.code == 0, run.output[-4000:]
    assert_same_weights(plain, runs)
    assert "the rollout server received SIGTERM" in ended[1].output

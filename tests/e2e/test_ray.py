"""Real ranks and a real rollout server as actors of Ray train what they train without it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

pytest.importorskip("ray")

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.support.ray_cluster import ray_cluster
from tests.support.runs import PLUGINS, REWARDS, command_line, grpo_flags, megatron_rlhf, read_json_lines, values_of
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
# a constant rate, because one of the runs is longer
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true",
         "--lr_decay_style", "constant", "--no_save_optim", "false", "--no_save_rng", "false"]  # fmt: skip
PLACES = ["--external_plugins", str(REWARDS), str(PLUGINS / "writes_place.py")]


def write_roles(file: Path, flags: list[str]) -> None:
    """Write flags of a trainer by role: two ranks, and a server that has vLLM's."""
    common = values_of(flags)
    of_engine = {name: common.pop(name) for name in list(common) if name.startswith("vllm_")}
    roles = {"train": {"gpus": 2}, "rollout": {"gpus": 1, **of_engine}, "max_failures": 0}
    file.write_text(yaml.safe_dump({"use_ray": True, **common, **roles}))


def test_ranks_on_ray_train_the_same_and_end_with_one_line(folder: Path, dense: Path, dataset: Path) -> None:
    """Two steps as without Ray. After them a rank is killed, which ends the run everywhere."""
    server = RolloutServer(dense, folder / "server.txt").start()
    plain_flags = [*FLAGS, "--vllm_mode", "server", "--vllm_server_base_url", server.url]
    plain = megatron_rlhf(dense, dataset, folder / "plain", 2, plain_flags, {API_KEY_VARIABLE: KEY})
    server.stop()
    assert plain.code == 0, plain.output[-4000:]

    on_ray, config, killed = folder / "ray", folder / "roles.yaml", []
    write_roles(config, grpo_flags(dense, dataset, on_ray, [*FLAGS, *PLACES, "--train_iters", "500"]))

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
    first, second = (load_file(each / "checkpoint-2" / "model.safetensors") for each in (plain.folder, on_ray))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    assert re.search(
        r"swift_megatron_grpo: machine 0 \([\d.]+\): rank 1 has ended: killed by signal 9\. All ranks and servers are "
        rf"ended; the newest whole checkpoint is {on_ray}/checkpoint-\d+\. To continue, on these or other machines, "
        r"use the same command with --resume auto\n\Z",
        run.output,
    )
    assert "(Ranks pid=" in run.output and "(RolloutServer pid=" in run.output
    assert "ChildFailedError" not in run.output

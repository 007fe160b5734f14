"""A scheduler that answers all completions of a prompt as a tree, on ranks and on servers."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from tests.paths import REPOSITORY
from tests.support.hf_check import check_with_transformers
from tests.support.runs import REWARDS, Finished, make_dataset, megatron_rlhf, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = pytest.mark.e2e
PLUGIN = str(REPOSITORY / "tests" / "support" / "tree.py")
TREE = ["--multi_turn_scheduler", "tree", "--external_plugins"]
FLAGS = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--train_iters", "2",
         "--save_steps", "100", "--max_tokens_per_micro_batch", "512", "--clip_grad", "100", "--global_batch_size",
         "12", "--num_generations", "4", "--max_completion_length", "8"]  # fmt: skip
TRAINED = ("prompt_ids", "completion_ids", "sampled", "conversation", "infos", "text", "finish_reason")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Path:
    return make_dataset(folder / "data.jsonl", rows=6)


def train(model: Path, dataset: Path, folder: Path, flags: list[str], **more: Any) -> tuple[Finished, list[Any]]:
    """Return the run and the rollouts of its first step."""
    dump = folder.with_suffix(".rollouts")
    run = megatron_rlhf(
        model, dataset, folder, 2, [*FLAGS, "--rollout_dump", str(dump), *flags], {API_KEY_VARIABLE: KEY}, **more
    )
    assert run.code == 0, run.output[-4000:]
    assert len(run.log) == 2 and all(step["rollout/k3_kl"] < 1e-7 for step in run.log)
    return run, read_json_lines(dump / "rollout-000000.jsonl")


def turns(row: dict[str, Any]) -> list[list[int]]:
    """Return the sampled tokens of each turn, which may have a sequence of its own."""
    found = []
    for sequence in (*row.get("earlier", ()), row):
        tokens = zip(sequence["sampled"], sequence["completion_ids"], strict=True)
        found += [[token for _, token in same] for sampled, same in groupby(tokens, key=itemgetter(0)) if sampled]
    return found


def check_trees(rows: list[Any]) -> None:
    """Three prompts on two engines, or on servers: each of four branches by one of them."""
    groups = [list(same) for _, same in groupby(rows, key=lambda row: row["prompt_id"])]
    assert [len(group) for group in groups] == [4, 4, 4]
    for group in groups:
        assert [row["infos"]["leaf"] for row in group] == ["0-0", "0-1", "1-0", "1-1"]
        first, second, third = (list(of_turn) for of_turn in zip(*map(turns, group), strict=True))
        assert first[0] == first[1] == first[2] == first[3]
        assert second[0] == second[1] != second[2] == second[3]
        assert len({*map(tuple, third)}) > 2


def test_trees_on_ranks_and_on_servers_are_the_same(folder: Path, dense: Path, dataset: Path) -> None:
    """One of two servers is killed while it answers, and its groups are generated again by the other one."""
    run, local = train(dense, dataset, folder / "local", [*TREE, PLUGIN, str(REWARDS)])
    check_trees(local)
    check_with_transformers(run.log[0], dense, (folder / "local").with_suffix(".rollouts") / "rollout-000000.jsonl")

    servers = [RolloutServer(dense, folder / f"server {number}.txt", [*TREE, PLUGIN]) for number in range(2)]
    killed: list[str] = []

    def kill(line: str) -> None:
        if "1/2" in line and not killed:
            killed.append(line)
            servers[0].kill()

    try:
        urls = [server.start().url for server in servers]
        for server in servers:
            server.wait()
        remote, rows = train(
            dense, dataset, folder / "remote",
            ["--vllm_mode", "server", "--vllm_server_base_url", *urls, "--vllm_server_pass_dataset", "true",
             "--external_plugins", str(REWARDS)], on_line=kill,
        )  # fmt: skip
    finally:
        for server in servers:
            server.stop()
    for row, expected in zip(rows, local, strict=True):
        assert {name: row[name] for name in TRAINED} == {name: expected[name] for name in TRAINED}
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)
    assert remote.log[0]["grad_norm"] == pytest.approx(run.log[0]["grad_norm"], rel=1e-5)
    assert killed and "is lost" in remote.output
    check_trees(read_json_lines((folder / "remote").with_suffix(".rollouts") / "rollout-000001.jsonl"))


def test_a_tree_of_another_width_says_which_flag(folder: Path, dense: Path, dataset: Path) -> None:
    plugin = folder / "narrow.py"
    plugin.write_text(f"{Path(PLUGIN).read_text()}\nTree.missing = 1\n")
    run = megatron_rlhf(dense, dataset, folder / "narrow", 1, [*FLAGS, *TREE, str(plugin), str(REWARDS)])
    assert run.code != 0
    assert "returned 3 conversations for the 4 completions of a prompt" in run.output
    assert "--num_generations" in run.output

"""Real ranks and `swift rollout` on two machines: each server gets its weights from the rank of its own machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_megatron_grpo.generation.protocol.api_key import API_KEY_VARIABLE
from swift_megatron_grpo.output.checkpoints.newest import find_newest
from tests.forking.programs import script_of_swift
from tests.support.choice import rest_nightly
from tests.support.machines import ADDRESSES, Machines, Started, namespaces, needs_namespaces
from tests.support.runs import PLUGINS, REWARDS, grpo_flags, read_json_lines
from tests.support.servers import KEY, RolloutServer

pytestmark = [pytest.mark.e2e, needs_namespaces]
EXACT = ["--torch_dtype", "float32", "--fp16", "false", "--seed_completions", "true", "--sync_check", "full"]
SLOW = ["--external_plugins", str(REWARDS), str(PLUGINS / "slow_transfers.py")]
TENSOR_PARALLEL = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]
IN_FLIGHT = ["--async_generate", "true", "--max_staleness", "2", "--seed_completions", "false",
             "--in_flight_weight_updates", "true", *TENSOR_PARALLEL]  # fmt: skip
ADAPTER = ["--tuner_type", "lora", "--vllm_enable_lora", "true", "--lr", "1e-2", "--sync_check", "canary"]
FP8 = ["--rollout_quantization", "fp8", "--torch_dtype", "bfloat16"]
OF_GATEWAYS = "rollout servers get weights from the first ranks of machines: {} from rank 0, {} from rank 1"


@contextmanager
def started(tmp_path: Path, dense: Path, *flags: str) -> Iterator[tuple[Machines, list[RolloutServer]]]:
    """Start two machines with a server on each; they are up once a run has reached them."""
    etc = tmp_path / "etc"
    etc.mkdir()
    with namespaces(etc) as machines:
        servers = [
            RolloutServer(dense, tmp_path / f"server{number}.txt", flags, host=host, place=machines.place(number))
            for number, host in enumerate(ADDRESSES)
        ]
        try:
            yield machines, [server.start() for server in servers]
        finally:
            for server in servers:
                if server.process is not None and server.process.poll() is None:
                    server.kill()


def train(
    machines: Machines, servers: Sequence[RolloutServer], dense: Path, dataset: Path, folder: Path, flags: Sequence[str]
) -> list[Started]:
    urls = ["--vllm_mode", "server", "--vllm_server_base_url", *(server.url for server in servers)]
    script = Path(script_of_swift("_megatron/rlhf.py"))
    all_flags = grpo_flags(dense, dataset, folder / "run", [*EXACT, *urls, *flags])
    environ = {API_KEY_VARIABLE: KEY, "TRANSFERS": str(folder)}
    return [machines.torchrun(number, script, *all_flags, folder=folder, **environ) for number in (0, 1)]


def finished(run: list[Started]) -> str:
    """Return what machine 0 has printed."""
    ends = [machine.finish(400) for machine in run]
    assert [code for code, _ in ends] == [0, 0], "\n".join(printed[-4000:] for _, printed in ends)
    return ends[0][1]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "of_server"),
    rest_nightly(
        [
            (IN_FLIGHT, []),
            ([], []),
            (ADAPTER, ["--vllm_enable_lora", "true"]),
            ([*FP8, "--rollout_importance_sampling_mode", "token_truncate"], FP8),
        ],
        [(IN_FLIGHT, [])],
    ),
    ids=["in flight", "weights", "adapter", "fp8"],
)
def test_each_server_gets_checked_weights_from_its_machines_rank(
    tmp_path: Path, dense: Path, dataset: Path, flags: list[str], of_server: list[str]
) -> None:
    """In every sync the checksums of all tensors, except of an adapter, and log-probs are those of the trainer."""
    with started(tmp_path, dense, *of_server) as (machines, servers):
        printed = finished(train(machines, servers, dense, dataset, tmp_path, ["--train_iters", "4", *flags]))
    assert OF_GATEWAYS.format(*(server.url for server in servers)) in printed
    assert "rank 0 connects to it" not in printed and "failed its check" not in printed
    for version in range(1, 4):
        assert f"weights {version} sent to 2 servers" in printed
    log = [row for row in read_json_lines(tmp_path / "run" / "logging.jsonl") if "loss" in row]
    assert len(log) == 4 and all("sync_check/max_diff" in row for row in log)
    assert len({row["reward"] for row in log}) > 1


@pytest.mark.nightly
def test_weights_of_a_gateway_that_differ_from_rank_0s_end_the_run(tmp_path: Path, dense: Path, dataset: Path) -> None:
    """Copies of data-parallel ranks have to be equal: checksums of all servers are compared with those of rank 0."""
    plugins = ["--external_plugins", str(REWARDS), str(PLUGINS / "differing_copy.py")]
    with started(tmp_path, dense) as (machines, servers):
        run = train(machines, servers, dense, dataset, tmp_path, plugins)
        code, printed = run[0].finish(300)
    assert code != 0 and "weight sync 0 failed its check twice" in printed
    assert f" {servers[1].url}: the engine holds other values than were sent: model.layers.1.mlp.up_proj" in printed
    assert f" {servers[0].url}: the engine" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_server_lost_in_a_transfer_comes_back_through_its_gateway(
    tmp_path: Path, dense: Path, dataset: Path, fault: str
) -> None:
    sending = tmp_path / "rank 1"
    with started(tmp_path, dense) as (machines, servers):
        flags = ["--train_iters", "200", "--vllm_server_timeout", "60" if fault == "killed" else "6"]
        run = train(machines, servers, dense, dataset, tmp_path, [*flags, *SLOW])
        wait_until(lambda: sending.exists() and int(sending.read_text() or 0) >= 2)
        if fault == "killed":
            servers[1].kill()
        else:
            for process in servers[1].processes():
                process.send_signal(signal.SIGSTOP)
        lost = f"rollout server {servers[1].url} is lost: "
        wait_until(lambda: lost in run[0].so_far())
        wait_until(lambda: "sent to 1 servers" in run[0].so_far())
        if fault == "killed":
            servers[1].start()
        else:
            for process in servers[1].processes():
                process.send_signal(signal.SIGCONT)
        wait_until(lambda: f"rollout server {servers[1].url} is back after" in run[0].so_far())
        of_both = run[0].so_far().count("sent to 2 servers")
        wait_until(lambda: run[0].so_far().count("sent to 2 servers") >= of_both + 2)
        printed = run[0].so_far()
        machines.kill(0)
    assert printed.count(lost) == 1 and "rank 0 connects to it" not in printed
    assert "1 of 2 remain" in printed and f"{servers[0].url} is lost" not in printed


@pytest.mark.nightly
def test_a_run_whose_gateway_is_lost_in_a_transfer_continues(tmp_path: Path, dense: Path, dataset: Path) -> None:
    """The machine is found lost as any other. The servers take the next run, which resumes, with the same gateways."""
    sending = tmp_path / "rank 1"
    flags = ["--save_steps", "1", "--no_save_optim", "false", "--no_save_rng", "false", "--add_version", "true",
             "--resume", "auto", "--node_timeout", "12", *SLOW]  # fmt: skip
    with started(tmp_path, dense) as (machines, servers):
        run = train(machines, servers, dense, dataset, tmp_path, [*flags, "--train_iters", "200"])
        wait_until(lambda: sending.exists() and int(sending.read_text() or 0) >= 3)
        machines.cut(1)
        machines.kill(1)
        code, printed = run[0].finish(120)
        assert code == 1 and "machine 1 (machine-b, rank 1) " in printed.rstrip("\n").rpartition("\n")[2]
        machines.join(1)
        newest, _ = find_newest(tmp_path / "run")
        assert newest is not None
        steps = str(newest.step + 2)
        printed = finished(train(machines, servers, dense, dataset, tmp_path, [*flags, "--train_iters", steps]))
    assert f"the run continues from step {newest.step}" in printed
    assert printed.count("sent to 2 servers") >= 2 and "is lost" not in printed

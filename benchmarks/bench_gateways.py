"""Time the transfer of weights by one rank, and by the first rank of each of two machines, in turns.

    python -m benchmarks.bench_gateways [--megabytes 256] [--mbit 800] [--servers 4] [--rounds 5]

Four machines are network namespaces of this one, which has to allow them: two with a rank each, two with the receivers
of servers. Each sends at most `--mbit` a second. The channels are those of a run, over gloo; nothing is exported, and
no engine loads what arrives.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

ARMS = (1, 2)  # senders
MACHINES = 4
BUCKET = 32 * 2**20
INSIDE = "GATEWAYS_INSIDE"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--megabytes", type=int, default=256, help="weights of a transfer, to each server")
    add("--mbit", type=int, default=800, help="megabits that a machine sends in a second")
    add("--servers", type=int, default=4)
    add("--rounds", type=int, default=5, help="measured transfers of each arm, after one to warm up")
    add("--role", choices=["server", "rank"], help="of the processes that this command starts")
    add("--number", type=int, help="of the server or rank")
    add("--folder", type=Path, help="where these processes meet")
    return parser.parse_args()


def address(machine: int) -> str:
    return f"10.78.0.{machine + 1}"


def build_network(stack: ExitStack, mbit: int) -> list[int]:
    """Join machines by a bridge; return a process in the namespace of each."""
    run("ip link add switch type bridge")
    run("ip link set switch up")
    holders = []
    for machine in range(MACHINES):
        holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE)  # fmt: skip
        stack.callback(holder.communicate)
        assert holder.stdout is not None
        holder.stdout.readline()
        run(f"ip link add port{machine} type veth peer name eth0 netns {holder.pid}")
        run(f"ip link set port{machine} master switch up")
        for command in (
            f"ip addr add {address(machine)}/24 dev eth0",
            "ip link set eth0 up",
            "ip link set lo up",
            f"tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 1mb latency 100ms",
        ):
            run(f"nsenter --net --target {holder.pid} {command}")
        holders.append(holder.pid)
    return holders


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def start(args: argparse.Namespace, holder: int, role: str, number: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": address(0), "MASTER_PORT": "29500",
                   "RANK": str(number), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}  # fmt: skip
    words = ["nsenter", "--net", "--target", str(holder), sys.executable, "-m", "benchmarks.bench_gateways",
             *(f"--{name}={getattr(args, name)}" for name in ("megabytes", "servers", "rounds", "folder")),
             f"--role={role}", f"--number={number}"]  # fmt: skip
    return subprocess.Popen(words, env=environment)


def serve(args: argparse.Namespace) -> None:
    """Receive all transfers of each arm, over a channel of its own."""
    from swift_megatron_grpo.weights.transport.rendezvous import Hub, Rendezvous, new_secret

    host = address(2 + args.number % 2)
    for arm in ARMS:
        hub = Hub(host, 0, 2, secret := new_secret())
        rendezvous = Rendezvous(host, hub.port, 2, secret, timeout=600.0)
        threading.Thread(target=receive, args=(rendezvous,), daemon=True).start()
        file = args.folder / f"{arm}.{args.number}"
        file.with_suffix(".part").write_text(json.dumps(asdict(rendezvous)))
        file.with_suffix(".part").rename(f"{file}.json")
    threading.Event().wait()


def receive(rendezvous: Any) -> None:
    import torch

    from swift_megatron_grpo.weights.transport.channel import Channel

    channel = Channel(rendezvous, 1, torch.device("cpu"))
    with suppress(RuntimeError):  # the rank has ended
        while True:
            channel.receive()


def send(args: argparse.Namespace) -> None:
    """Send as a rank of the run, and write seconds and CPU seconds of every transfer."""
    import torch
    import torch.distributed as dist

    from swift_megatron_grpo.generation.remote.gateways import Gateway, GatewayConnection, Gateways
    from swift_megatron_grpo.generation.remote.weight_sender import WeightSender
    from swift_megatron_grpo.runtime.parallel import Coordinator, connected_to_store

    dist.init_process_group("gloo")
    ranks, sender = Coordinator(timedelta(seconds=600)), WeightSender(torch.device("cpu"), BUCKET)
    weights = [(str(place), torch.rand(BUCKET // 4)) for place in range(args.megabytes * 2**20 // BUCKET)]
    met = {arm: rendezvous(args.folder, arm, args.servers) for arm in ARMS}
    if ranks.rank == 0:
        of_server = {url: place // 2 % 2 for place, url in enumerate(met[2])}
        gateways = Gateways(ranks, connected_to_store(), of_server)
        begun = gateways.begin([], {url: one for url, one in met[2].items() if of_server[url] == 1})
        others = [connection for connection in begun.values() if isinstance(connection, GatewayConnection)]
        own = {
            1: [sender.join(one) for one in met[1].values()],
            2: [sender.join(one) for url, one in met[2].items() if of_server[url] == 0],
        }
        sender.send(weights, own[2])
        assert len(others) == args.servers // 2 and not gateways.end(others)
    else:
        gateway = Gateway(ranks, sender, connected_to_store())
        gateway.send(weights, None)
    for _ in range(args.rounds + 1):
        for arm in ARMS:
            ranks.all_gather(None)
            began, before = time.monotonic(), time.process_time()
            if ranks.rank == 0:
                if arm == 2:
                    gateways.begin(others, {})
                assert not any(sender.send(weights, own[arm]))
                assert arm == 1 or not gateways.end(others)
            elif arm == 2:
                gateway.send(weights, None)
            row = {"senders": arm, "seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - before}
            with (args.folder / f"rank{ranks.rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def rendezvous(folder: Path, arm: int, servers: int) -> dict[str, Any]:
    from swift_megatron_grpo.weights.transport.rendezvous import Rendezvous

    files = [folder / f"{arm}.{number}.json" for number in range(servers)]
    while not all(file.exists() for file in files):
        time.sleep(0.1)
    return {file.name: Rendezvous.from_json(json.loads(file.read_text())) for file in files}


def measured(folder: Path) -> list[dict[str, Any]]:
    rows = [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()[len(ARMS) :]]
        for rank in (0, 1)
    ]
    return [summary(arm, [[row for row in of_rank if row["senders"] == arm] for of_rank in rows]) for arm in ARMS]


def summary(arm: int, rows: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    seconds = [row["seconds"] for row in rows[0]]
    cpu = [round(median(row["cpu_seconds"] for row in of_rank), 2) for of_rank in rows]
    return {"senders": arm, "seconds": round(median(seconds), 2), "least": round(min(seconds), 2),
            "most": round(max(seconds), 2), "cpu_seconds_of_ranks": cpu}  # fmt: skip


def main() -> int:
    args = parse()
    if args.role is not None:
        {"server": serve, "rank": send}[args.role](args)
        return 0
    if INSIDE not in os.environ:
        words = ["unshare", "--map-root-user", "--user", "--net", sys.executable, "-m", "benchmarks.bench_gateways"]
        os.execvpe(words[0], [*words, *sys.argv[1:]], {**os.environ, INSIDE: "1"})
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        holders = build_network(stack, args.mbit)
        for number in range(args.servers):
            stack.callback(start(args, holders[2 + number % 2], "server", number).kill)
        ranks = [start(args, holders[rank], "rank", rank) for rank in (0, 1)]
        for process in ranks:
            stack.callback(process.kill)
        if any([process.wait() for process in ranks]):
            raise SystemExit("bench: a rank has failed")
        for row in measured(args.folder):
            print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())

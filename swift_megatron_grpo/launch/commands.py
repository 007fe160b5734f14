"""The commands of the members: torchrun for the ranks of a machine, `swift rollout` for a server."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def torchrun(flags: Sequence[str], ranks: int, machines: int, machine: int, address: str, port: int) -> tuple[str, ...]:
    """Return the words that start the ranks of a machine, as ms-swift's `megatron` does."""
    swift = find_spec("swift")
    assert swift is not None and swift.origin is not None
    script = Path(swift.origin).parent / "cli" / "_megatron" / "rlhf.py"
    return ("-P", "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--nnodes", str(machines),
            "--node_rank", str(machine), "--master_addr", address, "--master_port", str(port), str(script),
            *flags)  # fmt: skip


def rollout(flags: Sequence[str], host: str, port: int) -> tuple[str, ...]:
    """Return the words that start a server."""
    return ("-P", "-m", "swift_megatron_grpo.generation.server", *flags, "--host", host, "--port", str(port))


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

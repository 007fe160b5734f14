"""torch's flight recorder is on by itself and says what deadlines/collectives.py reads of it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from swift_megatron_grpo.deadlines.collectives import describe_collectives


def test_a_collective_is_recorded(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.barrier()
    finally:
        said = describe_collectives()
        dist.destroy_process_group()
    assert "gloo:barrier of [] in group 0 default_pg" in said

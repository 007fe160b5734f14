"""vLLM's second runner has a CUDA graph of the whole step for every number of requests with drafts, as chosen here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import cudagraph_utils

from swift_megatron_grpo.generation.vllm.device_drafts import engine_settings
from tests.unit.generation.vllm.scheduled_runs import write_config

MODE = CUDAGraphMode.FULL_AND_PIECEWISE


def without_graphs(settings: dict[str, Any], at_once: int, folder: Path, patch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of running requests whose steps vLLM launches layer by layer."""
    write_config(folder)
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_num_seqs=at_once, **settings)
    vllm = config.create_engine_config()
    vllm.model_config.enforce_eager = False  # the rest is what vLLM does on a GPU
    graphs = vllm.compilation_config
    graphs.cudagraph_mode, graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = MODE, None, None
    vllm._set_cudagraph_sizes()
    first_and_last = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(cudagraph_utils, "get_pp_group", lambda: first_and_last)
    patch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    most = vllm.num_speculative_tokens
    manager = cudagraph_utils.CudaGraphManager(vllm, torch.device("cpu"), MODE, most + 1)
    manager._graphs_captured = True
    ranges = settings["speculative_config"]["num_speculative_tokens_per_batch_size"]
    depths = build_dynamic_sd_schedule_lookup(ranges, at_once, most)

    def mode(running: int) -> CUDAGraphMode:
        rows = 1 + depths[running]
        return manager.dispatch(running, running * rows, rows, 0).cg_mode

    return [running for running in range(1, at_once + 1) if mode(running) is not CUDAGraphMode.FULL]


@pytest.mark.parametrize("most", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("at_once", [16, 64, 100, 256])
def test_every_step_has_a_whole_graph(most: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_graphs(engine_settings(most, at_once), at_once, tmp_path, monkeypatch) == []


def test_other_numbers_of_drafts_still_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # When this fails, vLLM is mended, and `depth_of` may choose any number of drafts.
    settings = engine_settings(4, 64)
    settings["speculative_config"] |= {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [(1, 16, 4), (17, 21, 3), (22, 32, 2), (33, 64, 1)],
    }
    missed = without_graphs(settings, 64, tmp_path, monkeypatch)
    assert missed == [6, 9, 11, 14, 25, 26, 29, 33, 37, 45, 49, 50, 57]

"""An engine of two tensor-parallel workers, without vLLM, that loads weights by copies into its parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.transport.buckets import buckets, unpack
from swift_megatron_grpo.weights.transport.held_weights import WorkerWeights
from swift_megatron_grpo.weights.verify import Manifest, compare_with_sent


class Model(torch.nn.Module):
    """One of two tensor-parallel workers: q and k fused and sharded by rows, o sharded by columns, experts stacked and
    padded, the vocabulary padded."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker
        self.qk = torch.nn.Parameter(torch.zeros(4 + 2, 8))
        self.o = torch.nn.Parameter(torch.zeros(8, 4))
        self.norm = torch.nn.Parameter(torch.zeros(8))
        self.experts = torch.nn.Parameter(torch.zeros(3, 6, 8))  # 4 rows are used
        self.embedding = torch.nn.Parameter(torch.zeros(10, 8))  # 9 rows are used, by both workers

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            kind, _, index = name.partition(".")
            if kind == "q":
                self.qk.data[:4].copy_(tensor.narrow(0, 4 * self.worker, 4))
            elif kind == "k":
                self.qk.data[4:].copy_(tensor.narrow(0, 2 * self.worker, 2))
            elif kind == "o":
                self.o.data.copy_(tensor.narrow(1, 4 * self.worker, 4))
            elif kind == "expert":
                self.experts.data[int(index), :4].copy_(tensor.narrow(0, 4 * self.worker, 4))
            elif kind == "embedding":
                self.embedding.data[:9].copy_(tensor)
                self.embedding.data[9:].fill_(0)
            elif kind == "norm":
                self.norm.data.copy_(tensor)
        return set()


def tensors() -> dict[str, torch.Tensor]:
    shapes = {"q": (8, 8), "k": (4, 8), "o": (8, 8), "norm": (8,), "embedding": (9, 8)}
    shapes |= {f"expert.{i}": (8, 8) for i in range(3)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


class Engine:
    def __init__(self, finish: Any = lambda model: None) -> None:
        self.models = [Model(0), Model(1)]
        self.finish = finish
        self.loaded = [LoadedWeights(model, torch.float32, "engine 0") for model in self.models]

    def load(self, weights: dict[str, torch.Tensor], collect_checksums: bool = True) -> None:
        for model, loaded in zip(self.models, self.loaded, strict=True):
            loaded.load(iter(weights.items()), lambda model=model: self.finish(model), collect_checksums)

    def load_in_buckets(self, weights: dict[str, torch.Tensor], nbytes: int) -> None:
        for model, loaded in zip(self.models, self.loaded, strict=True):
            received = chain.from_iterable(unpack(b.header, b.data) for b in buckets(weights.items(), nbytes))
            loaded.load(received, lambda model=model: self.finish(model), collect_checksums=True)

    def problems(self, sent: dict[str, torch.Tensor]) -> tuple[set[tuple[str, str]], set[str]]:
        manifest = Manifest(torch.float32)
        assert dict(manifest.record(sent.items())).keys() == sent.keys()
        workers = [json.loads(json.dumps(loaded.worker_weights().to_json())) for loaded in self.loaded]
        problems, unreadable = compare_with_sent(
            manifest.specs, manifest.checksums(), map(WorkerWeights.from_json, workers)
        )
        assert all(problem.where == "engine 0" for problem in problems)
        return {(problem.tensor, problem.what) for problem in problems}, unreadable

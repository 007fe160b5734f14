"""A model and the layers that predict its drafts are loaded, read back and compared as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from swift_megatron_grpo.weights.export.prediction_layers import stored_prediction_layers
from swift_megatron_grpo.weights.load.loaded_weights import LoadedWeights
from swift_megatron_grpo.weights.load.prediction_layers import WithPredictionLayers
from swift_megatron_grpo.weights.transport.checksums import checksum, to_integers


class Part(torch.nn.Module):
    """Loads tensors by their names, without a prefix, one after the other."""

    def __init__(self, prefix: str, embedding: torch.nn.Parameter, layers: int) -> None:
        super().__init__()
        self.prefix, self.embedding = prefix, embedding
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.full((3, 2), torch.nan)) for _ in range(layers))
        self.names: list[str] = []

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            self.names.append(name)
            place = name.removeprefix(self.prefix)
            own[place].data.copy_(tensor)
            loaded.add(place)
        return loaded


def both() -> tuple[Part, Part, WithPredictionLayers]:
    embedding = torch.nn.Parameter(torch.full((4, 2), torch.nan))
    trunk, prediction = Part("model.", embedding, 2), Part("mtp.", embedding, 1)
    return trunk, prediction, WithPredictionLayers(trunk, prediction)


SENT = {"model.embedding": torch.randn(4, 2), **{f"model.layers.{i}": torch.randn(3, 2) for i in range(2)},
        "mtp.layers.0": torch.randn(3, 2)}  # fmt: skip


def nothing() -> None: ...


def test_each_model_loads_its_own_tensors_and_both_are_read_back() -> None:
    trunk, prediction, model = both()
    loaded = LoadedWeights(model, torch.float32, "engine 0")
    for discard in (False, True):  # the second load copies to the places that the first has shown
        if discard:
            for weight in model.parameters():
                weight.data.fill_(torch.nan)
        loaded.load(iter(SENT.items()), nothing, collect_checksums=True)
        held: Any = loaded.worker_weights()
        assert held.unwritten == held.unreadable == held.ignored == ()
        assert set(held.held) == set(SENT)
        for name, [part] in held.held.items():
            assert part.checksum == to_integers(checksum(SENT[name], torch.float32, None).view(1))[0]
    assert trunk.names == list(SENT)[:3] and prediction.names == ["mtp.layers.0"]


def test_a_layer_that_predicts_and_is_not_sent_is_noticed() -> None:
    *_, model = both()
    loaded = LoadedWeights(model, torch.float32, "engine 0")
    sent = {name: tensor for name, tensor in SENT.items() if name != "mtp.layers.0"}
    loaded.load(iter(sent.items()), nothing, collect_checksums=True)
    assert loaded.worker_weights().unwritten == ("prediction.layers.0",)


def test_stored_layers_of_all_files_are_read_once_in_the_engines_type(tmp_path: Path) -> None:
    first, second = torch.randn(2), torch.randn(3)
    save_file({"mtp.b": first.bfloat16(), "model.mtp": first}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"mtp.a": second}, tmp_path / "model-00001-of-00002.safetensors")
    stored = stored_prediction_layers(tmp_path, torch.float32)
    found = dict(stored())
    assert list(found) == ["mtp.a", "mtp.b"]
    assert torch.equal(found["mtp.a"], second) and torch.equal(found["mtp.b"], first.bfloat16().float())
    for file in tmp_path.iterdir():
        file.unlink()
    assert list(dict(stored())) == ["mtp.a", "mtp.b"]

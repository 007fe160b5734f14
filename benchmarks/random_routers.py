"""Count how unevenly routers with random weights choose experts, layer by layer, on a CPU in five minutes.

    python -m benchmarks.random_routers --json benchmarks/cpu/parts/random-routers.json

Benchmarks draw the weights of a model. Deep in such a model all tokens have almost the same hidden state, so that few
experts get most of them, where training balances the loads of experts. The layers are transformers' own, and one layer
draws new weights for each step, so that a model of any depth fits. Fields of a row of `layers`:

    spread       standard deviation of the loads of experts, relative to their mean
    fullest      by the number of expert-parallel ranks: rows of the fullest one, relative to the mean
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRotaryEmbedding

from benchmarks.harness.models import qwen3_config, text_sizes
from benchmarks.harness.shapes import DEVIATION, SHAPES

RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Loads:
    spread: float
    fullest: dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument(
        "--shape", default="30b-qwen3-moe", help="a shape with experts, of benchmarks/harness/shapes.py"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of one random sequence")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = []
    for loads in loads_of_layers(args.shape, args.tokens):
        layers.append(loads)
        print(json.dumps(asdict(loads)), flush=True)
    report = {
        "shape": args.shape,
        "tokens": args.tokens,
        "spread": round(fmean(loads.spread for loads in layers), 3),
        "fullest": {ranks: round(fmean(loads.fullest[ranks] for loads in layers), 3) for ranks in RANKS},
        "layers": [asdict(loads) for loads in layers],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


@torch.no_grad()
def loads_of_layers(name: str, tokens: int) -> Iterator[Loads]:
    """Yield the loads in each layer of the model, for tokens of a random sequence."""
    shape = SHAPES[name]
    config = qwen3_config(shape, text_sizes(None, shape))
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    hidden = torch.empty(1, tokens, shape.hidden).normal_(0, DEVIATION)
    positions = torch.arange(tokens)[None]
    angles = Qwen3MoeRotaryEmbedding(config)(hidden, positions)
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    layer = Qwen3MoeDecoderLayer(config, 0).float()
    logits: list[torch.Tensor] = []
    layer.mlp.gate.register_forward_hook(
        lambda router, inputs, _: logits.append(inputs[0].view(-1, shape.hidden) @ router.weight.T)
    )
    for _ in range(shape.layers):
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, DEVIATION)
            else:
                parameter.fill_(1)
        hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        yield loads_of(logits.pop().topk(shape.experts_per_token, dim=-1).indices, shape.experts)


def loads_of(chosen: torch.Tensor, experts: int) -> Loads:
    """Return the loads of experts and of ranks. `chosen`: [tokens, experts per token]."""
    loads = torch.bincount(chosen.flatten(), minlength=experts).double()
    fullest = {}
    for ranks in RANKS:
        rows = loads.view(ranks, -1).sum(1)
        fullest[ranks] = round((rows.max() / rows.mean()).item(), 3)
    return Loads(round((loads.std(correction=0) / loads.mean()).item(), 3), fullest)


if __name__ == "__main__":
    main()

"""Settings of a run, and what they determine: sizes, and weights, tokens and uneven routing drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

START = 0.5  # value of the gradient buffers before an error is measured: a way must add to them


@dataclass(frozen=True)
class Sizes:
    experts: int
    hidden: int
    ffn: int
    tokens: int
    topk: int

    @property
    def rows(self) -> int:
        return self.tokens * self.topk


@dataclass(frozen=True)
class Settings:
    """Options of the command line that determine what is measured; the report has them under these names."""

    experts: list[int]
    hidden: int
    ffn: int
    tokens: list[int]
    topk: int
    unevenness: float
    error_tokens: int
    repeats: int
    dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda:0")

    def sizes(self, experts: int, tokens: int) -> Sizes:
        return Sizes(experts, self.hidden, self.ffn, tokens, self.topk)


@dataclass(frozen=True)
class Weights:
    """Weights of all experts, [experts, out, in], and their fp32 gradient buffers."""

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_grad: torch.Tensor
    fc2_grad: torch.Tensor


@dataclass(frozen=True)
class Loads:
    """Rows of each expert."""

    counts: list[int]


def draw_routing(
    sizes: Sizes, unevenness: float, empty: Sequence[int] = (), tokens_seed: int | None = None
) -> torch.Tensor:
    """Return which experts each token goes to, [tokens, experts], with no token for the experts in `empty`.

    `tokens_seed`: of these tokens alone; the favoured experts are the same for all.
    """
    generator = torch.Generator().manual_seed(0)
    favour = unevenness * torch.randn(sizes.experts, generator=generator)
    favour[list(empty)] = -torch.inf
    if tokens_seed is not None:
        generator.manual_seed(1 + tokens_seed)
    scores = torch.randn(sizes.tokens, sizes.experts, generator=generator) + favour
    routing = torch.zeros(sizes.tokens, sizes.experts, dtype=torch.bool)
    return routing.scatter_(1, scores.topk(sizes.topk, dim=1).indices, True)


def loads_of(routing: torch.Tensor) -> Loads:
    return Loads(routing.sum(0).tolist())


def draw_weights(sizes: Sizes, device: torch.device) -> Weights:
    generator = torch.Generator(device).manual_seed(0)

    def draw(out: int, width: int) -> torch.Tensor:
        values = torch.empty(sizes.experts, out, width, device=device, dtype=torch.bfloat16)
        return values.normal_(generator=generator).mul_(width**-0.5)

    fc1, fc2 = draw(2 * sizes.ffn, sizes.hidden), draw(sizes.hidden, sizes.ffn)
    fc1_grad, fc2_grad = (torch.full(weight.shape, START, device=device) for weight in (fc1, fc2))
    return Weights(fc1, fc2, fc1_grad, fc2_grad)


def draw_rows(rows: int, width: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(rows, width, device=device, dtype=torch.bfloat16).normal_(generator=generator)

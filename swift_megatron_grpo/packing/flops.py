"""Estimates the training FLOPs of a sequence and of its images, so that ranks get equal work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from swift_megatron_grpo.packing.bins import Floats

N = TypeVar("N", float, Floats)


@dataclass(frozen=True, slots=True)
class DeltaNets:
    """The layers of a decoder with a gated delta net in place of softmax attention. Names are Megatron's."""

    layers: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int

    def products_per_token(self, hidden_size: int) -> int:
        """Return the multiplications of one layer for one token."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        projections = hidden_size * (2 * keys + 2 * values + 2 * self.linear_num_value_heads)  # q, k, v, gate, a, b
        rule = 4 * self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        return projections + values * hidden_size + rule  # the output projection


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """FLOPs of one forward pass over one packed sequence of t tokens, c of them completion tokens:

        per_token * t + per_token_squared * t**2 + per_completion_token * c

    The planner only compares sequences, so a common factor does not matter: backward costs about twice the forward in
    every term, and recomputation adds another forward.
    """

    per_token: float  # projections and feed-forward of all layers
    per_token_squared: float  # attention of all layers
    per_completion_token: float = 0.0  # the head: prompt positions never reach it

    @classmethod
    def of_transformer(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        vocab_size: int,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        gated_linear_unit: bool = True,
        delta_nets: DeltaNets | None = None,
        expert_layers: int = 0,
        experts_width: int = 0,
    ) -> FlopsModel:
        """Return the model of a decoder with softmax attention in every layer, but for those with a delta net.

        A multiplication and an addition count as two FLOPs. Names are Megatron's. In the `expert_layers` of a mixture
        of experts, a token passes through `experts_width`: the sum over its routed and shared experts. A causal mask
        leaves half of the t * t attention scores.
        """
        head_size = kv_channels or hidden_size // num_attention_heads
        queries = num_attention_heads * head_size
        keys_and_values = 2 * (num_query_groups or num_attention_heads) * head_size
        projections = hidden_size * (2 * queries + keys_and_values)  # q, k, v and the output
        widths = (num_layers - expert_layers) * ffn_hidden_size + expert_layers * experts_width
        feed_forward = hidden_size * widths * (3 if gated_linear_unit else 2)
        scores_and_mix = 2 * queries / 2
        linear_layers = 0 if delta_nets is None else delta_nets.layers
        in_delta_nets = 0 if delta_nets is None else delta_nets.products_per_token(hidden_size)
        full_layers = num_layers - linear_layers
        return cls(
            per_token=2.0 * (full_layers * projections + linear_layers * in_delta_nets + feed_forward),
            per_token_squared=2.0 * full_layers * scores_and_mix,
            per_completion_token=2.0 * hidden_size * vocab_size,
        )

    def of_sequence(self, tokens: N, completion_tokens: N) -> N:
        linear = self.per_token + self.per_token_squared * tokens
        return linear * tokens + self.per_completion_token * completion_tokens


@dataclass(frozen=True, slots=True)
class VisionTowerFlops:
    """FLOPs of one forward pass of a vision tower over one image, in which every patch attends to every other one.

    With windows, only `full_layers` do; in the others a patch attends to `window` patches.
    """

    layers: int
    full_layers: int
    hidden_size: int
    ffn_hidden_size: int
    window: int  # patches

    def of_image(self, patches: int) -> float:
        projections = self.hidden_size * (4 * self.hidden_size + 2 * self.ffn_hidden_size)
        attended = self.full_layers * patches + (self.layers - self.full_layers) * min(self.window, patches)
        return 2.0 * patches * (self.layers * projections + 2 * self.hidden_size * attended)

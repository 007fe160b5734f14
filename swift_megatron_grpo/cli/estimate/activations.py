"""Estimate the bytes that a forward pass keeps for backward. Pure Python.

The tensors are those that Megatron's layers save with Transformer Engine's kernels and this package's own: in bf16,
without dropout, with attention whose scores are never stored. tests/unit/cli/estimate compares the sums with peaks that
were measured on H200 and H100.

Rows of experts: t tokens with k experts each are t * k rows, and a row is kept where its expert is. With expert
parallelism a rank sends rows and receives others, the fullest one more, and what it keeps of a row is the same as with
one rank. The rows before the all-to-all, those after it and before they are copied or sorted by local
expert, and the outputs on their way back are freed in forward: only indices are kept of these steps.
tests/dist/test_saved_by_experts.py counts the tensors that the real layers save.

Vision towers: the sums are over the tensors that transformers' classes save; tests/unit/cli/estimate counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from swift_megatron_grpo.settings.layout import Layout

_HEAD_CHUNK_BYTES = 5 * 2**28  # of logits that exist at one time: training/head/fused.py
# Of the loads of single experts, relative to their mean: a token's experts are drawn at random, each with a load of its
# own. Fitted to the memory of adapters of Qwen3-30B-A3B, 128 experts, on two and four H200. Its routers had random
# weights (the loads of a layer: benchmarks/random_routers.py); training balances loads.
SPREAD = 0.9
PATCHES = 4  # for which a token stands

# Numbers that a block saves for each of its channels. Attention: the projection's output, because the values are a view
# of it, queries and keys with positions, the kernel's output and its copy as one tensor.
_ATTENTION = 3 + 2 + 1 + 1
_LAYER_NORM = 2  # input and output
_RMS_NORM = 4  # the input in fp32, and the output before and after it is scaled


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a language model. Widths are in channels."""

    layers: int
    hidden: int
    queries: int  # all heads of a token
    keys: int  # all heads of a token, of keys alone
    ffn: int  # of a dense layer
    vocabulary: int
    tied: bool
    normed_heads: bool = True  # queries and keys have a norm
    rotary: int = 0  # channels of a head with positions of three axes, for which there is no fused kernel
    experts: int = 0  # of a layer; 0: their number is unknown, and they have even loads
    expert_layers: frozenset[int] = frozenset()
    expert_ffn: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0  # of the experts that every token takes
    delta_layers: frozenset[int] = frozenset()  # with a gated delta net in place of attention
    delta_keys: int = 0
    delta_values: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """The parts that backward recomputes, in ms-swift's terms."""

    granularity: str | None = None  # full, selective, None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    elementwise: bool = False  # --recompute_elementwise


@dataclass(frozen=True, slots=True)
class Tokens:
    """The largest micro batch."""

    packed: int  # tokens that pass through the layers
    keys: int  # keys of attention: more than `packed`, if completions share a prompt whose keys are gathered for each
    trained: int  # that reach the head


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of the layers of one rank, for one micro batch."""

    kept: float  # from forward to backward
    recomputed: float = 0.0  # at one time, during backward


def share_of_fullest(experts: int, ranks: int) -> float:
    """Return the rows of the fullest rank, relative to the mean: the more experts a rank has, the more even."""
    return 1.0 if ranks == 1 or not experts else 1 + SPREAD * sqrt((ranks - 1) / experts)


def bytes_of_layers(decoder: Decoder, layers: Sequence[int], tokens: Tokens, layout: Layout, how: Recompute,
                    item: int = 2) -> LayerBytes:  # fmt: skip
    """Return the bytes of these layers of one rank. `item`: bytes of a number."""
    if how.granularity != "full":
        return LayerBytes(sum(_numbers(decoder, layer, tokens, layout, how) for layer in sorted(layers)) * item)
    whole = [_numbers(decoder, layer, tokens, layout, Recompute()) * item for layer in sorted(layers)]
    inputs = [decoder.hidden * tokens.packed / _split_of_inputs(layout) * item] * len(whole)
    step = how.num_layers or 1
    if how.method == "block":  # the first layers of the rank are recomputed, the others kept
        return LayerBytes(sum(inputs[:step]) + sum(whole[step:]), max(whole[:step], default=0.0))
    recomputed = max((sum(whole[first : first + step]) for first in range(0, len(whole), step)), default=0.0)
    return LayerBytes(sum(inputs[::step]), recomputed)


def bytes_of_head(decoder: Decoder, tokens: Tokens, layout: Layout, item: int = 2) -> float:
    """Return what the output layer keeps: hidden states of trained tokens, and one chunk of logits."""
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    rows = tokens.trained / context
    logits = rows * decoder.vocabulary / tensor * item
    return 2 * rows * decoder.hidden * item + min(_HEAD_CHUNK_BYTES, logits)


def micro_batches_in_flight(layout: Layout, pipeline_rank: int, micro_batches: int) -> float:
    """Return the micro batches that a rank of Megatron's 1F1B schedule keeps; each virtual stage has a share."""
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    following = pipeline - 1 - pipeline_rank
    if virtual == 1:
        return min(following + 1, micro_batches)
    group = layout.microbatch_group_size_per_vp_stage or pipeline
    warm_up = 2 * following + (virtual - 1) * group + 1
    return min(warm_up, micro_batches * virtual) / virtual


def _split_of_inputs(layout: Layout) -> int:
    """Return by how many ranks the tensors outside attention and feed-forward are divided."""
    return layout.context_parallel_size * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)


def _numbers(decoder: Decoder, layer: int, tokens: Tokens, layout: Layout, how: Recompute) -> float:
    """Return the numbers that a layer keeps, less what is recomputed."""
    selected = how.modules if how.granularity == "selective" else ()
    # The input, the sum between attention and feed-forward, and the outputs of the two norms.
    hidden_states = 2 if how.elementwise or "layernorm" in selected else 4
    activations = 0 if how.elementwise or "moe_act" in selected else 1
    queries, keys = decoder.queries, decoder.keys
    if layer in decoder.delta_layers:
        # Inputs of the convolution and its output, the gate, the rule's output and the gated norm of it.
        mixed = 2 * decoder.delta_keys + decoder.delta_values
        attention, gathered, angles = 3 * mixed + 4 * decoder.delta_values, 0, 0
    else:
        # Copies of queries and keys for their norm, the same with positions, a copy of the values, the output.
        copies = queries + keys if decoder.normed_heads else 0
        attention, gathered = copies + (queries + keys) + keys + queries, 2 * keys
        angles = 4 * decoder.rotary  # cosines and sines of queries, and again of keys, on every tensor-parallel rank
    if "mlp" in selected or "moe" in selected:
        feed_forward = 0.0
    elif layer in decoder.expert_layers:
        # Of t tokens: inputs of experts [t * k, hidden], sorted by expert; products of gate and up projection
        # [t * k, 2 * ffn]; the activation [t * k, ffn]; shared experts as in a dense layer. Outputs are not kept: the
        # router's probabilities weight the activation. Each of the ETP ranks gathers the rows of all of them,
        # [t * k * ETP, hidden], and computes 1 / ETP of their width.
        rows = decoder.experts_per_token * share_of_fullest(decoder.experts, layout.expert_model_parallel_size)
        width = rows * decoder.expert_ffn + decoder.shared_ffn
        feed_forward = rows * layout.expert_tensor_parallel_size * decoder.hidden + (2 + activations) * width
    else:
        feed_forward = (2 + activations) * decoder.ffn
    outside = hidden_states * decoder.hidden * tokens.packed / _split_of_inputs(layout)
    inside = (attention + feed_forward) * tokens.packed + max(0, tokens.keys - tokens.packed) * gathered
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    return outside + (inside / tensor + angles * tokens.packed) / context


# ---- vision towers


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Sizes of an image part of one of the types that train on images. Widths are in channels."""

    layers: int
    hidden: int
    ffn: int
    feed_forward: int  # tensors with `ffn` channels that a block saves
    rms_norms: bool
    values: int  # of a patch
    rows: int  # of the language model, for each token
    deepstack: int = 0  # of its first layers to which rows are added (Qwen3-VL)
    aligner_ffn: int = 0  # of an aligner with a gated feed-forward, behind a convolution (GLM-V); 0: two matrices
    shuffles: bool = False  # the aligner takes four patches as one, and is two matrices of a row's width (InternVL)


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens that stand for images, or for recordings, on the data-parallel rank that has most."""

    shown: int = 0  # in the largest micro batch, once for each completion that shows the image
    distinct: int = 0  # the same, each image once
    of_rollout: int = 0  # of all steps of a rollout, each image once

    def scaled(self, share: float) -> MediaTokens:
        """Return those of a micro batch that is larger by this factor; a rollout has as many."""
        return MediaTokens(round(self.shown * share), round(self.distinct * share), self.of_rollout)


def bytes_of_vision_tower(tower: VisionTower, tokens: int, trains_tower: bool, trains_aligner: bool,
                          checkpointing: bool, item: int = 2) -> float:  # fmt: skip
    """Return what the vision tower keeps for backward, for images of so many tokens. `item`: bytes of a number.

    The aligner ("merger") turns the outputs of blocks into rows. `checkpointing`: blocks keep their inputs alone.
    """
    if not trains_tower and not trains_aligner:
        return 0.0
    hidden, mergers = tower.hidden, 1 + tower.deepstack
    blocks = tower.layers * (hidden if checkpointing else _numbers_of_block(tower))
    if tower.aligner_ffn:
        # Norms before and behind the blocks, of which the first is only added to, and the input of the convolution.
        # The aligner works on tokens, and has one row for four patches.
        blocks += (2 * _RMS_NORM - 1 + 1) * hidden
        aligner = 4 * tower.rows + 4 * tower.aligner_ffn
    elif tower.shuffles:
        aligner = _LAYER_NORM * PATCHES * hidden + 2 * tower.rows
    elif not trains_tower:
        aligner = PATCHES * 4 * hidden * mergers
    else:
        aligner = PATCHES * hidden * (_RMS_NORM + 2 if tower.rms_norms else 1 + 3 * mergers)
    of_tower = PATCHES * (tower.values + blocks) if trains_tower else 0
    return float(tokens * (of_tower + aligner) * item)


def bytes_of_block(tower: VisionTower, tokens: int, item: int = 2) -> float:
    """Return what one block needs: when backward recomputes it, or in a forward pass that keeps nothing."""
    return float(tokens * PATCHES * _numbers_of_block(tower) * item)


def bytes_of_rows(tower: VisionTower, images: MediaTokens, frozen: bool, item: int = 2) -> float:
    """Return the bytes of rows: those a frozen vision tower keeps for a rollout, and those that layers add."""
    kept = images.of_rollout * (1 + tower.deepstack) if frozen else 0
    added = images.shown * tower.deepstack
    return float((kept + added) * tower.rows * item)


def _numbers_of_block(tower: VisionTower) -> int:
    norm = _RMS_NORM if tower.rms_norms else _LAYER_NORM
    attention = _ATTENTION - tower.shuffles  # where the kernel's output needs no copy
    return (attention + 2 * norm) * tower.hidden + tower.feed_forward * tower.ffn

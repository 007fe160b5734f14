"""The stand-in's attention and its gradients, compared with a dense fp64 reference written from the definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.transformer_engine.attention import DotProductAttention

HEADS, GROUPS, CHANNELS = 4, 2, 8


def tensors(*batch: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Return random query, key and value, [*batch, heads, channels]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*batch, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def layer(**kwargs: object) -> DotProductAttention:
    return DotProductAttention(HEADS, CHANNELS, num_gqa_groups=GROUPS, **kwargs)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of one sequence in fp64; a query that sees no key gets zeros.

    [q, h, d], [k, g, d], [k, g, d], bool [q, k] or [h, q, k] -> [q, h * d]
    """
    query, key, value = query.double(), key.double(), value.double()
    outputs = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = query[:, head] @ key[:, group].T / CHANNELS**0.5
        visible = allowed if allowed.dim() == 2 else allowed[head]
        weights = torch.where(visible, (scores - scores.detach().amax()).exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        if offset is not None:
            total = total + (offset[head].double() - scores.detach().amax()).exp()
        outputs.append(weights / total.clamp_min(1e-300) @ value[:, group])
    return torch.stack(outputs, 1).flatten(1)


def packing(lengths: list[int], rooms: list[int] | None = None) -> dict[str, torch.Tensor]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    arguments = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    if rooms is not None:
        padded = torch.tensor([0, *rooms]).cumsum(0).int()
        arguments |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    return arguments


def assert_same(
    inputs: list[torch.Tensor], actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6
) -> None:
    """Compare the values, and the gradients of all inputs."""
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad(actual, inputs, upstream.to(actual.dtype))
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(grad, expected_grad, atol=20 * tolerance, rtol=20 * tolerance)


def sequence_masks(lengths: list[int], rooms: list[int], total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for packed tokens: [t, t] same sequence; [t, 1] and [1, t] position in its sequence, -1: padding."""
    sequence, position = torch.full((total,), -1), torch.full((total,), -1)
    start = 0
    for index, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        sequence[start : start + length], position[start : start + length] = index, torch.arange(length)
        start += room
    same = (sequence[:, None] == sequence[None]) & (sequence[:, None] >= 0)
    return same, position[:, None], position[None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize(
    ("lengths", "rooms", "total"),
    [([5, 9, 1, 4], [5, 9, 1, 4], 19), ([5, 9, 1], [8, 12, 4], 24), ([5, 9], [5, 9], 20)],
    ids=["dense", "padded-between", "padded-at-the-end"],
)
def test_packed_sequences_match_the_reference(
    causal: bool, window: tuple[int, int] | None, lengths: list[int], rooms: list[int], total: int
) -> None:
    inputs = tensors(total)
    same, row, column = sequence_masks(lengths, rooms, total)
    allowed = same & (row >= column) if causal else same
    if window is not None:
        allowed = allowed & (column >= row - window[0]) & (column <= row + window[1])
    mask_type = "padding_causal" if causal else "padding"
    actual = layer(attn_mask_type=mask_type, window_size=window)(
        *inputs, qkv_format="thd", **packing(lengths, None if sum(rooms) == sum(lengths) else rooms)
    )
    assert_same(inputs, actual, reference(*inputs, allowed))


@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "causal_bottom_right"])
@pytest.mark.parametrize("window", [None, (4, 0), (2, 3)])
def test_batches_match_the_reference(mask_type: str, window: tuple[int, int] | None) -> None:
    batch, tokens = 2, 11
    inputs = tensors(tokens, batch)
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    allowed = row >= column if "causal" in mask_type else torch.ones(tokens, tokens, dtype=torch.bool)
    if window is not None:
        allowed = allowed & (column >= row - window[0]) & (column <= row + window[1])
    actual = layer(window_size=window)(*inputs, attn_mask_type=mask_type)
    expected = torch.stack([reference(*(t[:, i] for t in inputs), allowed) for i in range(batch)], 1)
    assert_same(inputs, actual, expected)


@pytest.mark.parametrize(("mask_type", "shift"), [("causal", 0), ("causal_bottom_right", 5)])
def test_more_keys_than_queries_match_the_reference(mask_type: str, shift: int) -> None:
    query, key, value = tensors(4, 1)[0], *tensors(9, 1)[1:]
    allowed = torch.arange(4)[:, None] + shift >= torch.arange(9)[None]
    actual = layer()(query, key, value, attn_mask_type=mask_type)
    assert_same([query, key, value], actual[:, 0], reference(query[:, 0], key[:, 0], value[:, 0], allowed))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_masks_match_the_reference(causal: bool) -> None:
    lengths, tokens = [7, 3], 7
    inputs = tensors(tokens, 2)
    hidden = torch.arange(tokens)[None] >= torch.tensor(lengths)[:, None]  # [b, s], True is hidden
    mask = hidden[:, None, None]
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    mask_type = "padding_causal" if causal else "padding"
    for given in (mask, (mask, mask)):
        expected = []
        for index in range(2):
            allowed = ~(hidden[index][:, None] | hidden[index][None])
            allowed = allowed & (row >= column) if causal else allowed
            expected.append(reference(*(t[:, index] for t in inputs), allowed))
        assert_same(inputs, layer()(*inputs, given, attn_mask_type=mask_type), torch.stack(expected, 1))
    with pytest.raises(ValueError, match=r"a padding mask must be \[b, 1, 1, s\]"):
        layer()(*inputs, mask.expand(2, 1, 7, 7), attn_mask_type=mask_type)
    with pytest.raises(ValueError, match="needs attention_mask"):
        layer()(*inputs, attn_mask_type=mask_type)


def test_arbitrary_masks_match_the_reference() -> None:
    inputs = tensors(6, 1)
    hidden = torch.rand(1, HEADS, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[:, :, 2] = True  # a query that sees no key
    attention = layer(attn_mask_type="arbitrary")
    assert_same(inputs, attention(*inputs, hidden)[:, 0], reference(*(t[:, 0] for t in inputs), ~hidden[0]))


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_attention_sinks_match_the_reference(softmax_type: str) -> None:
    attention = layer(softmax_type=softmax_type, attn_mask_type="padding_causal")
    inputs, lengths = tensors(12), [7, 5]
    same, row, column = sequence_masks(lengths, lengths, 12)
    offset = attention.softmax_offset
    parameters = [offset] if softmax_type == "learnable" else []
    assert isinstance(offset, torch.nn.Parameter) == bool(parameters)
    actual = attention(*inputs, qkv_format="thd", **packing(lengths))
    assert_same([*inputs, *parameters], actual, reference(*inputs, same & (row >= column), offset))


def test_a_sequence_is_bit_identical_whatever_its_neighbours() -> None:
    lengths = [33, 64, 7, 128, 50]
    inputs = tensors(sum(lengths), dtype=torch.bfloat16)
    attention = layer(attn_mask_type="padding_causal")
    packed = attention(*inputs, qkv_format="thd", **packing(lengths))
    for begin, end in pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist()):
        alone = attention(*(t[begin:end] for t in inputs), qkv_format="thd", **packing([end - begin]))
        assert torch.equal(packed[begin:end], alone)
    assert packed.dtype == torch.bfloat16


def test_accumulation_is_in_fp32() -> None:
    inputs = tensors(256, dtype=torch.bfloat16)
    same, row, column = sequence_masks([256], [256], 256)
    actual = layer(attn_mask_type="padding_causal")(*inputs, qkv_format="thd", **packing([256]))
    expected = reference(*inputs, same & (row >= column))
    half_ulp = 2**-8  # of bf16: one rounding, at the end
    torch.testing.assert_close(actual.double(), expected, rtol=1.001 * half_ulp, atol=1e-6)


def test_dropout_applies_in_training_only_and_is_reproducible() -> None:
    inputs, state = tensors(6, 1), torch.get_rng_state()
    attention = layer(attention_dropout=0.5)
    plain = layer()(*inputs)
    assert torch.equal(attention.eval()(*inputs), plain)
    attention.train()
    torch.set_rng_state(state)
    first = attention(*inputs)
    torch.set_rng_state(state)
    assert torch.equal(attention(*inputs), first)
    assert not torch.equal(first, plain)


def test_attention_rejects_unsupported_arguments() -> None:
    inputs = tensors(6, 1)
    for kwargs in (
        dict(checkpoint_core_attention=True),
        dict(core_attention_bias_type="post_scale_bias"),
        dict(core_attention_bias=torch.ones(1, HEADS, 6, 6)),
        dict(qkv_format="bshd"),
        dict(alibi_slopes=torch.ones(HEADS)),
        dict(inference_params=object()),
        dict(fp8_output=True),
    ):
        with pytest.raises(NotImplementedError, match=next(iter(kwargs))):
            layer()(*inputs, **kwargs)
    with pytest.raises(TypeError, match="fancy"):
        layer()(*inputs, fancy=True)
    for kwargs, message in (
        (dict(attn_mask_type="diagonal"), "diagonal"),
        (dict(qkv_format="thd", attn_mask_type="causal"), "thd needs a padding mask"),
        (dict(qkv_format="thd", attn_mask_type="padding"), "thd needs cu_seqlens"),
    ):
        with pytest.raises(ValueError, match=message):
            layer()(*inputs, **kwargs)
    with pytest.raises(ValueError, match="softmax_type"):
        layer(softmax_type="sharp")


def test_the_cost_of_a_pack_is_the_sum_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 sequences of 32 tokens, a dense [t, t] mask would need 64 times the work and memory."""
    scores = []
    attend = F.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        scores.append(query.shape[2] * key.shape[2])
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    layer(attn_mask_type="padding_causal")(*tensors(64 * 32), qkv_format="thd", **packing([32] * 64))
    assert sum(scores) == 64 * 32 * 32

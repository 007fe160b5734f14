"""The stand-in of vLLM's gated delta net: requests that go on, in both layouts of the cache, match a recurrence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.platforms.cpu.linear_attention.vllm_core import compute_in_torch
from tests.unit.platforms.cpu.linear_attention.test_fla import recurrence

KEY_HEADS, HEADS, SIZE, VALUE_SIZE, WIDTH = 2, 4, 8, 6, 4
KEYS, VALUES = KEY_HEADS * SIZE, HEADS * VALUE_SIZE
CHANNELS = 2 * KEYS + VALUES


class Layer:
    """The attributes of vLLM's layer that its core reads."""

    prefix, num_k_heads, num_v_heads = "layers.0", KEY_HEADS, HEADS

    def __init__(self, channels_first: bool, slots: int = 5, drafts: int = 0) -> None:
        torch.manual_seed(1)
        self.conv1d = SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH), bias=None)
        self.A_log, self.dt_bias = torch.rand(HEADS), torch.randn(HEADS)
        kept = WIDTH - 1 + drafts
        conv = (slots, CHANNELS, kept) if channels_first else (slots, kept, CHANNELS)
        self.kv_cache = [torch.full(conv, 9.0), torch.full((slots, HEADS, VALUE_SIZE, SIZE), 9.0)]  # never read as is

    def rearrange_mixed_qkv(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = x.split([KEYS, KEYS, VALUES], dim=-1)
        return [
            q.reshape(1, -1, KEY_HEADS, SIZE),
            k.reshape(1, -1, KEY_HEADS, SIZE),
            v.reshape(1, -1, HEADS, VALUE_SIZE),
        ]


def core_of(layer: Layer, metadata: Any, channels_first: bool) -> Any:
    """Return the core, replaced in a module like vLLM's."""

    def upstream(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: str
    ) -> None: ...

    module: Any = SimpleNamespace(
        cpu_gdn_attention_core=upstream,
        get_forward_context=lambda: SimpleNamespace(
            no_compile_layers={layer.prefix: layer}, attn_metadata=metadata and {layer.prefix: metadata}
        ),
        _resolve_layer_name=lambda name: name,
        is_conv_state_dim_first=lambda: channels_first,
    )
    compute_in_torch(module)
    return module.cpu_gdn_attention_core


def batch(decodes: int, slots: list[int], lengths: list[int], continued: list[bool]) -> Any:
    return SimpleNamespace(
        spec_sequence_masks=None,
        num_actual_tokens=sum(lengths),
        num_decodes=decodes,
        num_prefills=len(lengths) - decodes,
        has_initial_state=torch.tensor(continued),
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        non_spec_state_indices_tensor=torch.tensor(slots),
    )


def expected(layer: Layer, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Compute a whole sequence in fp64."""
    convolved = F.conv1d(F.pad(qkv.double().T, (WIDTH - 1, 0))[None], layer.conv1d.weight.double(), groups=CHANNELS)
    q, k, v = (x[0].double() for x in layer.rearrange_mixed_qkv(F.silu(convolved[0]).T))
    q, k = (F.normalize(x, dim=-1).repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    decay = -layer.A_log.double().exp() * F.softplus(a.double() + layer.dt_bias.double())
    return recurrence(q * SIZE**-0.5, k, v, decay, b.double().sigmoid())


@pytest.mark.parametrize("channels_first", [False, True])
def test_prompts_in_parts_and_decoding_match_a_recurrence(channels_first: bool) -> None:
    """One request is read in two parts with another between them; then both decode."""
    layer = Layer(channels_first)
    torch.manual_seed(0)
    sequences = {2: 72, 4: 3}  # tokens by slot
    inputs = {slot: [torch.randn(n, width) for width in (CHANNELS, HEADS, HEADS)] for slot, n in sequences.items()}
    done, outputs = dict.fromkeys(sequences, 0), {slot: list[torch.Tensor]() for slot in sequences}
    steps = [[(2, 40)], [(4, 1)], [(2, 30)], [(2, 1), (4, 1)], [(4, 1), (2, 1)]]
    for number, step in enumerate(steps):
        spans = {slot: slice(done[slot], done[slot] + count) for slot, count in step}
        parts = [torch.cat([inputs[slot][i][span] for slot, span in spans.items()]) for i in range(3)]
        decodes = len(step) if number >= 3 else 0
        metadata = batch(decodes, list(spans), [n for _, n in step], [done[slot] > 0 for slot in spans])
        out = torch.zeros(len(parts[0]), HEADS, VALUE_SIZE)
        core_of(layer, metadata, channels_first)(*parts, out, layer.prefix)
        for (slot, count), result in zip(step, out.split([n for _, n in step]), strict=True):
            outputs[slot].append(result)
            done[slot] += count
    for slot in sequences:
        assert torch.allclose(torch.cat(outputs[slot]).double(), expected(layer, *inputs[slot]), rtol=0, atol=1e-5)


def test_a_run_that_measures_memory_writes_nothing() -> None:
    layer, out = Layer(False), torch.zeros(3, HEADS, VALUE_SIZE)
    core_of(layer, None, False)(torch.ones(3, CHANNELS), torch.ones(3, HEADS), torch.ones(3, HEADS), out, layer.prefix)
    assert not out.any() and (layer.kv_cache[0] == 9).all()


@pytest.mark.parametrize("channels_first", [False, True])
def test_states_behind_wrong_drafts_are_taken_back(channels_first: bool) -> None:
    """A request verifies up to three drafts a step, while the prompt of another one is read in two parts."""
    layer = Layer(channels_first, slots=8, drafts=3)
    torch.manual_seed(0)
    text, other = ([torch.randn(n, width) for width in (CHANNELS, HEADS, HEADS)] for n in (18, 11))
    read(layer, [part[:6] for part in text], False, channels_first)
    done, accepted, outputs = 6, 1, []
    for number, (right, wrong) in enumerate([(0, 3), (2, 1), (3, 0), (0, 0), (1, 0), (0, 2)]):
        drafted = [torch.cat([part[done : done + 1 + right], torch.randn(wrong, part.shape[1])]) for part in text]
        prompt = [part[6 * (number - 1) : 6 * number] for part in other] if number in (1, 2) else []
        inputs = [torch.cat(parts) for parts in zip(drafted, prompt, strict=True)] if prompt else drafted
        count, size = len(drafted[0]), len(inputs[0])
        metadata = SimpleNamespace(
            spec_sequence_masks=torch.ones(1),
            num_actual_tokens=size,
            num_decodes=0,
            num_prefills=int(bool(prompt)),
            num_spec_decodes=1,
            spec_query_start_loc=torch.tensor([0, count]),
            spec_token_indx=torch.arange(count),
            spec_state_indices_tensor=torch.tensor([[4, 7, 2, 6]]),
            num_accepted_tokens=torch.tensor([accepted]),
            non_spec_token_indx=torch.arange(count, size),
            has_initial_state=torch.tensor([number == 2]),
            non_spec_query_start_loc=torch.tensor([0, size - count]) if prompt else None,
            non_spec_state_indices_tensor=torch.tensor([1]),
        )
        out = torch.zeros(size, HEADS, VALUE_SIZE)
        core_of(layer, metadata, channels_first)(*inputs, out, layer.prefix)
        outputs.append(out[: 1 + right])
        if prompt:
            begin = 6 * (number - 1)
            of_prompt = expected(layer, *other)[begin : begin + size - count]
            assert torch.allclose(out[count:].double(), of_prompt, rtol=0, atol=1e-5)
        done, accepted = done + 1 + right, 1 + right
    found = torch.cat(outputs).double()
    assert torch.allclose(found, expected(layer, *text)[6:done], rtol=0, atol=1e-5)


def read(layer: Layer, inputs: list[torch.Tensor], continued: bool, channels_first: bool) -> None:
    """Read a prompt into slot 4."""
    metadata = batch(0, [4], [len(inputs[0])], [continued])
    out = torch.zeros(len(inputs[0]), HEADS, VALUE_SIZE)
    core_of(layer, metadata, channels_first)(*inputs, out, layer.prefix)

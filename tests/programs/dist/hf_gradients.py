"""Compute the loss and its gradient in fp64, as in the paper, with plain transformers and autograd. No megatron.

python hf_gradients.py MODEL OUT.pt [one_prompt | sequences]
python hf_gradients.py FOLDER types TYPE... : of FOLDER/TYPE to FOLDER/TYPE.pt
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from swift_megatron_grpo.cli.check_layouts.ranks import fixed_samples
from tests.programs.dist.sequence_runs import samples_of_step
from tests.support.plain_models import load_plain, logits_of

EPSILON_LOW, EPSILON_HIGH, BETA, TEMPERATURE = 0.2, 0.28, 0.1, 0.9


def main(folder: str, out: str, *others: str) -> None:
    if out == "types":
        for model_type in others:
            torch.save(gradients(f"{folder}/{model_type}"), f"{folder}/{model_type}.pt")
    else:
        torch.save(gradients(folder, *others), out)


def gradients(folder: str, prompts: str = "") -> dict[str, Any]:
    """Return the loss, its gradient by the names of transformers, and the log-probs of each sample."""
    config = json.loads(Path(folder, "config.json").read_text())
    language = config.get("text_config", config)
    if "linear_num_key_heads" in language:
        use_exact_delta_rule(language["model_type"].removesuffix("_text"))
    model = load_plain(folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    vocabulary = model.config.get_text_config().vocab_size
    if prompts == "sequences":
        samples = samples_of_step(vocabulary, 1, whole=False)
    else:
        samples = fixed_samples(vocabulary, 8, 1, True, prompts == "one_prompt")
    trained = Counter[int]()  # tokens, by completion
    for number, sample in enumerate(samples):
        sample.completion = number if sample.completion < 0 else sample.completion
        trained[sample.completion] += sum(sample.completion_mask)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        log_p = (logits_of(model, tokens) / TEMPERATURE).log_softmax(-1)
        rows = [i for i, trained in enumerate(sample.completion_mask) if trained]
        now = torch.stack([log_p[i - 1, sample.tokens[i]] for i in rows])
        logprobs.append(now.tolist())
        ratio = (now - torch.tensor(sample.old_logprobs, dtype=torch.float64)).exp()
        clipped = ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH)
        gap = torch.tensor(sample.ref_logprobs, dtype=torch.float64) - now
        kl = gap.exp() - gap - 1
        surrogate = torch.min(ratio * sample.advantage, clipped * sample.advantage)
        total = total - (surrogate - BETA * kl).sum() / trained[sample.completion] / len(trained)
    total.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": total.item(), "grads": grads, "logprobs": logprobs}


def use_exact_delta_rule(model_type: str) -> None:
    """Replace transformers' delta rule, which computes in fp32 whatever its inputs are, by a recurrence."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    assert "fla" not in sys.modules
    module.torch_chunk_gated_delta_rule = delta_rule


def delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **ignored):  # type: ignore[no-untyped-def]
    """Compute [b, t, h, k], [b, t, h, k], [b, t, h, v], [b, t, h], [b, t, h] -> [b, t, h, v], token by token."""
    if use_qk_l2norm_in_kernel:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = value.new_zeros(len(value), value.shape[2], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv,bh->bhkv", key[:, t], error, beta[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, 1), None


if __name__ == "__main__":
    main(*sys.argv[1:])

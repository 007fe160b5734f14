"""Compute the loss and its gradient in fp64, as in the paper, with plain transformers and autograd. No megatron.

python hf_gradients.py MODEL OUT.pt
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from swift_megatron_grpo.tools.check_layouts import fixed_samples

EPSILON_LOW, EPSILON_HIGH, BETA, TEMPERATURE = 0.2, 0.28, 0.1, 0.9


def main(folder: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    samples = fixed_samples(model.config.vocab_size, 8, seed=1, policies_given=True)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        log_p = (model(tokens).logits[0] / TEMPERATURE).log_softmax(-1)
        rows = [i for i, trained in enumerate(sample.completion_mask) if trained]
        now = torch.stack([log_p[i - 1, sample.tokens[i]] for i in rows])
        ratio = (now - torch.tensor(sample.old_logprobs, dtype=torch.float64)).exp()
        clipped = ratio.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH)
        gap = torch.tensor(sample.ref_logprobs, dtype=torch.float64) - now
        kl = gap.exp() - gap - 1
        surrogate = torch.min(ratio * sample.advantage, clipped * sample.advantage)
        total = total - (surrogate - BETA * kl).mean() / len(samples)
    total.backward()
    torch.save({"loss": total.item(), "grads": {n: p.grad for n, p in model.named_parameters()}}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

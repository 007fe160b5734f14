"""Make a tiny random text model with a byte-level tokenizer, for runs that test a script and not a model.

    python scripts/make_tiny_model.py --out DIR [--kind dense|moe|deepseek]

The model is saved as Hugging Face safetensors in bf16. ms-swift, mcore-bridge and vLLM load it like a real one. The
same seed writes the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from swift_megatron_grpo.cli.tiny_models import TEXT_CONFIGS, Sizes, make_tokenizer

TYPES = {"dense": "qwen3", "moe": "qwen3_moe", "deepseek": "deepseek_v3"}


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    """Return the model; the routers of a DeepSeek-V3 get a bias, as released ones have."""
    deepseek = args.kind == "deepseek"
    sizes = Sizes(
        hidden=args.hidden,
        intermediate=args.intermediate or 2 * args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.heads if deepseek else args.kv_heads,
        head_dim=2 * args.head_dim if deepseek else args.head_dim,  # both parts of a query
        experts=args.experts,
        expert_ffn=args.hidden // 2,
        positions=2048,
    )
    model_type = TYPES[args.kind]
    values = TEXT_CONFIGS[model_type](sizes) | {"tie_word_embeddings": args.tie}
    torch.manual_seed(args.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.05 * torch.randn_like(bias))
    return model.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--kind", choices=TYPES, default="dense", help="Qwen3, Qwen3-MoE or DeepSeek-V3")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size")
    parser.add_argument("--intermediate", type=int, help="width of the dense MLP; default: twice the hidden size")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads")
    parser.add_argument(
        "--head-dim", type=int, default=32, help="size of a head; vLLM's CPU attention needs at least 32"
    )
    parser.add_argument("--experts", type=int, default=4, help="experts per layer of a mixture")
    parser.add_argument("--tie", action="store_true", help="share the weights of embedding and output layer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()

    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(args)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    print(f"{args.out}: {model.config.model_type}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()

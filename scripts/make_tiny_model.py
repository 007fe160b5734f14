"""Make a tiny random text model with a byte-level tokenizer, for runs that test a script and not a model.

    python scripts/make_tiny_model.py --out DIR [--kind dense|moe|deepseek]

The model is saved as Hugging Face safetensors in bf16. ms-swift, mcore-bridge and vLLM load it like a real one. The
same seed writes the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from swift_megatron_grpo.cli.tiny_models.text import TEXT_CONFIGS, VOCABULARY, Sizes, make_tokenizer


def make_deepseek(args: argparse.Namespace) -> PreTrainedModel:
    """Return a DeepSeek-V3 whose routers have a bias, as released ones do."""
    hidden, head_dim = args.hidden, 2 * args.head_dim  # head_dim: of each of the two parts of a query, and of a value
    sizes = Sizes(hidden, 2 * hidden, args.layers, args.heads, args.heads, head_dim, args.experts, hidden // 2, 2048)
    config = AutoConfig.for_model("deepseek_v3", **TEXT_CONFIGS["deepseek_v3"](sizes))
    torch.manual_seed(args.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.05 * torch.randn_like(bias))
    return model.to(torch.bfloat16)


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> PreTrainedModel:
    if args.kind == "deepseek":
        return make_deepseek(args)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate or 2 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": args.tie,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(args.seed)
    if args.kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16)
    config = Qwen3MoeConfig(
        **shape,
        num_experts=args.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=args.hidden // 2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.0,
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--kind", choices=["dense", "moe", "deepseek"], default="dense", help="Qwen3, Qwen3-MoE or DeepSeek-V3"
    )
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
    model = make_model(tokenizer, args)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    print(f"{args.out}: {model.config.model_type}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()

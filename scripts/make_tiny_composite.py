"""Make a tiny random model with an image part, or with linear attention, for runs that test a script and not a model.

    python scripts/make_tiny_composite.py --out DIR [--kind qwen3_5|qwen3_5_moe|qwen3_next|qwen2_vl|...]

The same seed writes the same files. swift_megatron_grpo/cli/tiny_models makes the models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers.utils import logging

from swift_megatron_grpo.cli.tiny_models import KINDS, WITHOUT_HEAD_DIM, Shape, Sizes, save_composite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--kind", choices=KINDS, default="qwen3_5", help="model_type of config.json")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--interval", type=int, default=2, help="every so many layers one has full attention")
    parser.add_argument("--hidden", type=int, help="hidden size; default: 64, of some types 128")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads, also of linear attention")
    parser.add_argument(
        "--head-dim", type=int, default=32, help="size of a head; vLLM's CPU attention needs at least 32"
    )
    parser.add_argument("--experts", type=int, default=4, help="experts per layer")
    parser.add_argument("--tie", action="store_true", help="share the weights of embedding and output layer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    hidden = args.hidden or (args.heads * args.head_dim if args.kind in WITHOUT_HEAD_DIM else 64)

    logging.disable_progress_bar()
    sizes = Sizes(
        hidden=hidden,
        intermediate=2 * hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        experts=args.experts,
        expert_ffn=3 * hidden // 4,
        positions=2048,
    )
    model = save_composite(args.out, Shape(args.kind, sizes, args.interval, args.tie), args.seed)
    print(f"{args.out}: {args.kind}, {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()

"""Simulations of runs that nobody has paid for: `swift-megatron-grpo simulate-scaling`, -split and -tail.

scaling.py  balance, messages and gradients of up to 512 ranks
split.py    the share of GPUs for servers, against colocation
tail.py     idle slots of a server at the end of rollouts, with later rollouts started ahead
lengths.py  distributions of token counts
"""

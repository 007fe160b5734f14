"""Completions of several turns: what vLLM in the training processes and the rollout server have in common."""

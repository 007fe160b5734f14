"""Generation of completions, with the same interface for vLLM in the training processes and behind servers.

interface.py  the interface of an engine, its requests and its generations
requests.py   conversion of requests to ms-swift's types, and of completions to rollouts
local/        vLLM in the training processes
remote/       vLLM behind `swift rollout`

Tests: tests/unit/generation, and tests/e2e for the engines themselves.
"""

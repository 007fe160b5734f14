"""Generation of completions, with the same interface for vLLM in the training processes and behind servers.

interface.py  the interface of an engine, its requests and its generations
requests.py   conversion of requests to ms-swift's types, and of completions to rollouts
local/        vLLM in the training processes
remote/       vLLM behind `swift rollout`, seen from the trainer
server/       `swift rollout` itself
protocol/     their messages
conversations/  multi-turn conversations
vllm/         settings of vLLM, log-probs, adapters, for local/ and server/

Tests: tests/unit/generation, and tests/e2e for the engines themselves.
"""

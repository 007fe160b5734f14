"""vLLM in the training processes ("colocate").

engine.py         the engine: weights, memory, single-turn completions
sampling.py       one vLLM batch from requests to rollouts
give_up.py        gives up a generation when the run stops
conversations.py  the engine for multi-turn conversations
turn_loop.py      ms-swift's multi-turn loop around the engine, with the tokens of every turn recorded

Tests: tests/e2e/test_generation.py, tests/e2e/test_multi_turn.py, tests/e2e/test_sync_check.py.
"""

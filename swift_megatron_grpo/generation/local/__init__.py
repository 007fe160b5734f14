"""vLLM in the training processes ("colocate").

engine.py           the engine: weights, memory, single-turn completions, given up when the run stops
engine_settings.py  refuse settings that vLLM does not accept, before a model loads
conversations.py    the engine for multi-turn conversations, each of which continues when its tool answers
running_turns.py    turns of conversations in vLLM

Tests: tests/unit/generation/local, and in tests/e2e test_generation.py, test_multi_turn.py and test_sync_check.py.
"""

"""`swift-megatron-grpo simulate-drafts`: how many decode steps drafts would have saved in rollouts that were dumped.

    command.py  the command, and its tables
    dump.py     reads the tokens of dumped rollouts
    replay.py   rollouts side by side, step by step, with exact acceptance of drafts

An engine with drafts finds them in the same way: generation/vllm/texts.py.

Tests: tests/unit/cli/simulate_drafts.
"""

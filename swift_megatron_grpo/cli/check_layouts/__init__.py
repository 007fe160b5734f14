"""`swift-megatron-grpo check-layouts`: compare parallel layouts with one rank.

    command.py  the command, and differences from one rank
    layouts.py  layouts by name, their flags, and the processes that run them
    ranks.py    what each rank does: trains a fixed batch, writes metrics and weights, destroys the layout

Tests: tests/dist/test_layouts.py.
"""

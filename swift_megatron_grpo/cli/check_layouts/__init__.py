"""`swift-megatron-grpo check-layouts`: compare parallel layouts with one rank.

    command.py    the command
    layouts.py    layouts by name
    launch.py     flags of the runs, and the processes that run them
    ranks.py      what each rank does: trains a fixed batch, writes metrics and weights
    torn_down.py  destroys a layout in its process, so that the next one can be created
    compare.py    differences from one rank

Tests: tests/dist/test_layouts.py.
"""

"""Command-line tools for users: python -m swift_megatron_grpo.tools.NAME.

    check_layouts.py  trains a fixed batch in several parallel layouts and compares the results with one rank
    templates.py      lists the template scripts, or copies them into a folder

Tests: tests/dist/test_layouts.py and tests/unit/tools.
"""

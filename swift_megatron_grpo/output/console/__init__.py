"""The lines that a run prints and the report that it writes, in place of ms-swift's progress bar and PNG files.

    installing.py  replaces ms-swift's callback and its PNG files for the time of a run
    callback.py    the callback: logging.jsonl, lines, progress and the report, on the rank that logs
    allocator.py   how often PyTorch's allocator found no room
    lines.py       a step as one line in columns, and a completion as another (pure Python)
    progress.py    pace and remaining time without start-up, and the status line of a terminal (pure Python)

Tests: tests/unit/output/console; tests/e2e/test_cli.py runs the command.
"""

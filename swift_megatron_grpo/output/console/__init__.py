"""The lines that a run prints and the report that it writes, in place of ms-swift's progress bar and PNG files.

    callback.py   replaces ms-swift's callback and its PNG files: logging.jsonl, lines and the report
    stalls.py     conditions under which a run stops learning, with the flags that help (pure Python)
    lines.py      what is printed: a step, a completion, the pace, the status line of a terminal (pure Python)

Tests: tests/unit/output/console; tests/e2e/test_cli.py runs the command.
"""

"""`--check true`: everything that can be known about a run without a GPU, a weight or a second process.

    __main__.py   the command
    arguments.py  parses the flags as a rank does, without process groups and folders
    model.py      sizes of the model, from its config.json
    rows.py       prompts of the dataset, and what the reward functions return for made-up answers
    estimate.py   micro batches, memory and time of a step
    report.py     the text

Arithmetic is in planning/. Tests: tests/unit/dry_run, tests/unit/planning.
"""

"""`swift-megatron-grpo check`: check a run without a GPU, a weight or a second process.

    command.py        the command
    check.py          one check from top to bottom; parses the flags as a rank does
    model.py          sizes of the model, from its config.json
    rows.py           prompts of the dataset, and what the reward functions return for made-up responses
    micro_batches.py  the plan of a step, and its largest micro batch
    estimate.py       memory and time of a step
    report.py         the text

Arithmetic is in cli/estimate/.
Tests: tests/unit/cli/check, tests/unit/cli/estimate; tests/e2e/test_dry_run.py runs the command.
"""

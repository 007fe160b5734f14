"""`swift-megatron-grpo check-script`: try a cluster's script on this machine.

    command.py    the command
    shell.py      reads the launches of `megatron rlhf` and `swift rollout` from a shell script
    stand_ins.py  what such a script gets on this machine: rows, rewards, smaller sizes
    rehearsal.py  the tiny run that is trained in place of the script's

Tests: tests/unit/cli/check_script, tests/e2e/test_scripts.py.
"""

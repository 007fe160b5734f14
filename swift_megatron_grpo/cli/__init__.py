"""Command-line tools for users: python -m swift_megatron_grpo.cli.NAME.

    check/              `--check true`: read model, data set and rewards in one process
    estimate/           memory and time of a layout
    convert/            settings of verl, siiRL, slime and ROLL as a script
    doctor/             check packages and machine before a run
    check_layouts.py    trains a fixed batch in several parallel layouts and compares the results with one rank
    torn_down.py        destroys a layout in its process, so that the next one can be created
    check_script.py     checks the flags of a shell script for a cluster, and trains a step of it on this machine
    shell_scripts.py    reads the launches of `megatron rlhf` and `swift rollout` from a shell script
    script_stand_ins.py what such a script gets on this machine: data, rewards, smaller sizes
    stand_in_models.py  tiny random models by architecture
    tiny_models.py      text models and their tokenizer
    tiny_composites.py  models with an image part or linear attention
    templates.py        lists the template scripts, or copies them into a folder

Tests: tests/dist/test_layouts.py, tests/e2e/test_scripts.py and tests/unit/cli.
"""

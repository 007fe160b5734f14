"""Convert the settings of another trainer to a script for `megatron rlhf --rlhf_type grpo`.

    swift-megatron-grpo convert run_qwen3.sh
    swift-megatron-grpo convert ppo_trainer.yaml actor_rollout_ref.model.path=Qwen/Qwen3-8B

    command.py   the command: writes a script
    reading.py   reads the settings of a shell script, of YAML, or of a Python program
    programs.py  reads the calls of TRL in a Python program
    tables.py    what a table of keys is, and how it is applied
    rules.py     rules that the tables of several trainers share
    verl.py      the table of verl
    trainers.py  the tables of slime and ROLL
    trl.py       the table of TRL
    ray.py       the table of ms-swift's Ray pipeline

Every key ends in one of four places: a flag, a comment that this package needs no such setting, a list of what must be
decided by hand, or the list of keys that have no counterpart. docs/migration.md has the tables.
"""

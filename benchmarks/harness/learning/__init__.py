"""Implementation of benchmarks/learn.py: the same task in four trainers.

settings.py  the settings of a run, and the flags of each trainer for them
prompts.py   the dataset, and the check that all trainers make the same tokens of its prompts
search.py    the choice of learning rate and group size
steps.py     rewards, seconds and lengths of each step, from what each trainer logs, and the weights that it saved
accuracy.py  greedy held-out accuracy of checkpoints, one program for all trainers
trl_arm.py   TRL: `python -m benchmarks.harness.learning.trl_arm FLAG...`
verl_arm.py  verl: `python -m benchmarks.harness.learning.verl_arm OVERRIDE...`
reward.py    the reward of TRL and verl, and of accuracy.py
bands.py     mean and range over seeds, in windows of steps and where weights were saved
page.py      docs/learning.md
curves.py    docs/learning.svg

tests/unit/benchmarks/test_learn.py covers this folder. benchmarks/learn_chain.sh runs it in one rental of GPUs.
"""

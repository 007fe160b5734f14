"""ms-swift's arguments with the flags of settings/: their checks, and their conversion into the settings of the stages.

grpo_arguments.py  the class that ms-swift parses into, its overrides of ms-swift, and the order of all checks
derived.py         values that follow from the flags of several stages
to_config.py       convert the arguments into the frozen settings of the stages
resume.py          find the checkpoint of --resume, and set the flags that load it
start_up_log.py    the first lines that a run logs
refused.py         flags of ms-swift that are refused, or change nothing; types of models that are trained, or refused
command_line.py    names, types and choices as typed, before the parser: also names of ms-swift 3 and misspelt ones
reward_models.py   plugins and callers of reward models
environment.py     checks of files, folders, plugins, registries and packages
models.py          checks of the model's architecture
teachers.py        checks of a teacher's architecture and of its tokens

Tested by tests/unit/arguments.
"""

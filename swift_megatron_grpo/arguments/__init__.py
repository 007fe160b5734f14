"""Command-line flags: their definitions, their checks, and their conversion into the settings of the stages.

flags.py             the flags that this package adds to ms-swift's, with their help texts
grpo_arguments.py    the class that ms-swift parses into, and its overrides of ms-swift
derived.py           values that follow from the flags
to_config.py         convert the arguments into the frozen settings of config.py
resume.py            find the checkpoint of --resume, and set the flags that load it
start_up_checks.py   run all checks, in the three orders that ms-swift requires
start_up_log.py      the first lines that a run logs
support_table.py     the support of every ms-swift flag, and the messages that refuse one
flag_combinations.py flags that are not supported, and flags that exclude each other
command_line.py      names and values as typed, before the parser
flag_values.py       types and choices of the values on the command line
local_files.py       files and folders that must exist, and lines of datasets that cannot be read
named_paths.py       all flags that name files, folders, or entries of tables
trained_parameters.py  flags that choose what is trained
flag_names.py        names of ms-swift 3, and misspelt ones
model_checks.py      models with an image part or linear attention: supported types, and reasons for the others
model_origin.py      whether ModelScope can tell if a model is the latest
stacked_experts.py   a Qwen3-VL mixture of experts that transformers has saved again
image_rows.py        the images of the datasets, counted and checked on all ranks
image_checks.py      parts of a model that are trained, layouts and limits against images
rope.py              positions that differ from the checkpoint's, for vLLM as for the trainer
long_prompts.py      --truncation_strategy delete and raise
rows_on_ranks.py     work on every row of a dataset, distributed over the ranks
value_checks.py      single flags: paths, rewards, lengths, micro batches
problems.py          collect the problems of several checks into one error
advice.py            phrases that the messages of several checks share

Tested by tests/unit/arguments.
"""

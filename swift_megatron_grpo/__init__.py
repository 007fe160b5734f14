"""A GRPO trainer for ms-swift's Megatron command line. Imports nothing: torch loads this package early.

trainer.py       the trainer class that ms-swift builds
config.py        frozen settings of every stage
types.py         values that stages pass to each other
layout.py        sizes of every kind of parallelism
parallel.py      ranks, process groups and collectives on Python objects
failures.py      failures of several ranks at once
import_hooks.py  callbacks around the import of a module

Each folder lists its files in its docstring. Tested by tests/.
"""

__version__ = "0.1.0"
SWITCH = "SWIFT_MEGATRON_GRPO"  # the environment variable that turns this package on and off

"""A GRPO trainer for ms-swift's Megatron command line. Imports nothing: torch loads this package early.

trainer/  the trainer class that ms-swift builds
types.py  values that stages pass to each other

Each folder lists its files in its docstring. Tested by tests/.
"""

__version__ = "0.1.0"
SWITCH = "SWIFT_MEGATRON_GRPO"  # the environment variable that turns this package on and off

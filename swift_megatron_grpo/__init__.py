"""A GRPO trainer for ms-swift's Megatron command line. Nothing is imported here: torch loads this package early."""

__version__ = "0.1.0"
SWITCH = "SWIFT_MEGATRON_GRPO"  # the environment variable that turns this package on and off

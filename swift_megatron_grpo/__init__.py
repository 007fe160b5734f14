"""A GRPO trainer for ms-swift's Megatron command line. Nothing is imported here: torch loads this package early."""

__version__ = "0.1.0"

"""A GRPO trainer for ms-swift's Megatron command line. Nothing is imported here: torch loads this package at start-up."""

__version__ = "0.1.0"

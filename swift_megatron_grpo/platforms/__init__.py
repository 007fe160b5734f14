"""Where the trainer runs when not on NVIDIA GPUs."""

"""What this package adds to `swift rollout`, in that process and its children."""

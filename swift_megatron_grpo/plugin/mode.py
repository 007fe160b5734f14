"""The environment variable that switches this package on and off, and its values."""

from __future__ import annotations

VARIABLE = "SWIFT_MEGATRON_GRPO"
MODES = {
    "on": "the trainer, and the CPU platform where there is no accelerator",
    "off": "nothing: ms-swift as without this package",
    "platform": "only the CPU platform, under ms-swift's own trainer",
}

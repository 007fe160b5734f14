"""Every test process is one in which megatron can be imported, whether or not the machine has a GPU."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from swift_megatron_grpo.platforms.cpu import activate

    activate()

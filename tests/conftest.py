"""Every test process is one in which megatron can be imported, whether or not the machine has a GPU."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # a busy machine is not a fault
settings.load_profile("patient")

if not torch.cuda.is_available():
    from swift_megatron_grpo.platforms.cpu import activate

    activate()

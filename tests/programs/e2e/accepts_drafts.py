"""Make the engine of a server accept every draft, as a wrong rule would: a plugin of test_served_drafts.py."""

from swift_megatron_grpo.generation.vllm import position_noise
from tests.programs.e2e.speculation import always_accepted

position_noise.accepted = always_accepted

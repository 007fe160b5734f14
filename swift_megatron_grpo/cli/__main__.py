"""Run the command: `python -m swift_megatron_grpo.cli` is `swift-megatron-grpo`."""

import sys

from swift_megatron_grpo.cli.main import main

sys.exit(main())

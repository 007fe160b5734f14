"""The entry point (group `torch.backends`) that torch calls at the end of `import torch`, in every process.

It must cost no more than a few empty files, below a millisecond on most machines. It therefore compares only the
name of the program, and imports the rest of this folder for the few programs that this package may change: a rank of
`megatron rlhf`, `swift rollout`, torchrun, and the `megatron` and `swift` scripts. SWIFT_MEGATRON_GRPO=off turns all
of that off.

Where torch is a CPU build, every process gets a finder that makes torchvision importable, with SWIFT_MEGATRON_GRPO=off
as well: without it `import transformers` fails next to an installed torchvision
(platforms/cpu/torchvision_operators.py).

Processes of a rollout server without a GPU get the fixes of vLLM. They are spawned, so that only an environment
variable reaches them before vLLM checks its settings.
"""

import os
import sys
from typing import Any

# names that command_line.classify may accept, and the scripts whose arguments may hold a key
_PROGRAMS = ("-m", "rlhf.py", "rollout.py", "swift", "megatron", "torchrun")
_MEGATRON_MODULE = os.path.join("swift", "cli", "_megatron", "main.py")  # run by `python -m`, not by the script
_ENGINE_ON_CPU = "SWIFT_MEGATRON_GRPO_ENGINE_ON_CPU"  # as in platforms/cpu, which takes too long to import here


def arm() -> None:
    """Activate this package if the program needs it; a failure prints one line and never ends the process."""
    try:
        torch = sys.modules.get("torch")  # absent only if something else calls this
        if torch is not None and torch.version.cuda is None:
            sys.meta_path.insert(0, _TorchvisionFinder())
        program = sys.argv[0] if sys.argv else ""
        if os.path.basename(program) in _PROGRAMS or program.endswith(_MEGATRON_MODULE):
            from swift_megatron_grpo.plugin.activation import activate

            activate(sys.argv, sys.orig_argv, os.environ)
        if _ENGINE_ON_CPU in os.environ:
            from swift_megatron_grpo.platforms.cpu import activate_engine

            activate_engine()
    except Exception as error:
        print(f"swift-megatron-grpo: not active in this process: {type(error).__name__}: {error}", file=sys.stderr)


class _TorchvisionFinder:
    """Hooks torchvision when it is imported, and costs nothing before: it imports nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torchvision.extension":
            return None
        sys.meta_path.remove(self)
        from swift_megatron_grpo.platforms.cpu.torchvision_operators import find_with_operators

        return find_with_operators(name, path)

"""vLLM's batch invariance, which a variable of the environment turns on for a whole process."""

import os

VARIABLE = "VLLM_BATCH_INVARIANT"
_OLDEST = (9, 0)  # compute capability; on older GPUs vLLM replaces every matrix product, and 0.25.1 refuses them


def is_requested() -> bool:
    """Return True if the environment asks for it."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def batch_invariance(flag: bool, capability: tuple[int, int] | None) -> bool:
    """Turn it on for the engines of this process if the flag or the environment asks for it; return whether it is on.

    `capability`: of the GPU; None: a CPU. Raises ValueError for a device on which vLLM has no such kernels.
    """
    if not (flag or is_requested()):
        return False
    if capability is None or capability < _OLDEST:
        found = "there is none here" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        raise ValueError(
            f"--batch_invariant true: vLLM's kernels for it need a GPU of compute capability 9.0, and {found}; leave "
            f"it out, and unset {VARIABLE}"
        )
    os.environ[VARIABLE] = "1"  # read by vLLM when its engine starts, and by modules of it that are imported then
    return True

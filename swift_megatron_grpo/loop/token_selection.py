"""Selection of the tokens that the policy loss reads: those of the highest entropy.

Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939. One threshold for the whole step, so that the selection
does not depend on how completions were packed or distributed. ms-swift computes one per micro batch and rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swift_megatron_grpo.types import Sample


def entropy_threshold(entropies: Iterable[np.ndarray], quantile: float) -> float:
    """Return the threshold above which the share `quantile` of all tokens lies, or 0 without tokens.

    It is interpolated, as in torch and numpy.
    """
    values = [array for array in entropies if array.size]
    return float(np.quantile(np.concatenate(values), 1 - quantile)) if values else 0.0


def select_tokens(sample: Sample, entropies: np.ndarray, threshold: float) -> None:
    sample.selected = (entropies >= threshold).tolist()

"""The losses, looked up by name, and what is common to them.

A loss sees one micro batch and returns (loss, metrics). Both are the micro batch's share of a value of the whole
optimizer step: shares of all micro batches and ranks add up, so neither depends on how samples were packed or dealt.
Metrics whose name ends in _max or _min are extremes instead, and the engine takes the extreme of all. No host sync, no
collective. m: trained tokens of the micro batch, s: its sequences.
"""

from swift_megatron_grpo.training.loss.correction import effective_sample_size
from swift_megatron_grpo.training.loss.terms import Metrics, TokenOutput
from swift_megatron_grpo.training.loss.total import LOSSES, LossFunction, make_loss, reads_entropy

__all__ = ["LOSSES", "LossFunction", "Metrics", "TokenOutput", "effective_sample_size", "make_loss", "reads_entropy"]

"""Accepts a draft where it is the token that its position samples anyway, in place of vLLM's `rejection_sample`.

vLLM accepts a draft with its probability, and samples another token from what is left: completions then depend on the
drafts. Here every drafted row is sampled with the noise of its own position (position_noise.py), as a plain step would
sample it. Drafts are accepted up to the first that is not the sample, whose sample takes its place. So drafts decide
how many steps a completion takes and never what it says. vLLM applies penalties, temperature, top-k and top-p to
drafted rows, and computes the log-probs of what is returned here.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

NO_TOKEN = -1  # vLLM's mark behind the last token of a request


def accepted(
    sample: Callable[[torch.Tensor], torch.Tensor],
    draft_token_ids: torch.Tensor,
    num_draft_tokens: Sequence[int],
    max_spec_len: int,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    greedy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the tokens of a step, [requests, longest draft + 1], with NO_TOKEN behind the last one of a request.

    `sample`: the tokens of all drafted rows, from their logits [drafts, vocabulary]. `bonus_token_ids`: what the row
    behind the last draft of each request samples. `greedy`: [requests]; None: all are.
    """
    counts = np.asarray(num_draft_tokens)
    if greedy is None:
        sampled = target_logits.argmax(-1)
    else:
        rows = torch.repeat_interleave(greedy, _sent(counts, greedy.device), output_size=len(draft_token_ids))
        sampled = torch.where(rows, target_logits.argmax(-1), sample(target_logits))
    column = np.arange(max_spec_len + 1)
    has_draft = column < counts[:, None]
    row = np.where(has_draft, (np.cumsum(counts) - counts)[:, None] + column, 0)
    at = _sent(np.stack([row, has_draft, column == counts[:, None]]), sampled.device)  # one copy to the device
    tokens, is_drafted, is_bonus = sampled[at[0]], at[1].bool(), at[2].bool()
    agrees = is_drafted & (tokens == draft_token_ids[at[0]])
    reached = torch.cat([torch.ones_like(agrees[:, :1]), agrees[:, :-1].long().cumprod(1).bool()], 1)
    tokens = torch.where(is_bonus, bonus_token_ids.view(-1, 1).to(tokens.dtype), tokens)
    return torch.where(reached & (is_drafted | is_bonus), tokens, NO_TOKEN).to(torch.int32)


def accepted_rows(
    samples: torch.Tensor, inputs: torch.Tensor, ends: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a step, [requests, most + 1], and how many of them each request has got.

    The same without waiting for the device, from rows as vLLM's second model runner has them. A request has one row
    more than drafts, and its rows are neighbours. `samples`: what each row samples. `inputs`: the token before each, so
    all but a request's first one are drafts. `ends`: [requests + 1], where the rows of each request begin and end.
    """
    begins = ends[:-1].to(torch.int64)
    columns = torch.arange(most + 1, device=samples.device)
    rows = (begins[:, None] + columns).clamp(max=len(samples) - 1)
    tokens = samples[rows]
    is_drafted = columns[1:] < (ends[1:] - ends[:-1])[:, None]
    agrees = is_drafted & (inputs[rows][:, 1:] == tokens[:, :-1])
    return tokens, (1 + agrees.cumprod(1).sum(1)).to(torch.int32)


def _sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(values.astype(np.int64))
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)

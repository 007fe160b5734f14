"""The most memory that torch held at one time while something ran: counted at the allocator, not computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """On top of what was held before. Everything torch allocated counts, also inside of its operators."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function()
    assert measured.profiler is not None
    live = peak = 0
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()  # negative where memory is given back
        peak = max(peak, live)
    return peak

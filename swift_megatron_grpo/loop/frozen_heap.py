"""Keeps Python's garbage collector from scanning the objects of models, optimizer and vLLM in every full collection.

Adapters on 128 experts of 24 layers, 12,384 trained tensors, leave 1.1 million objects after set-up, and a full
collection takes 0.56 s on a CPU core, whatever the sizes of the tensors. An optimizer that handles the tensors one by
one starts one within four steps, each of which it takes 0.48 s; with a frozen heap the collection takes 0.02 s.

vLLM in the training processes freezes the heap itself once its engine is built. With servers, or with replayed
rollouts, nothing did.
"""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect all garbage once, and exempt what is left from later collections.

    Frozen objects are still freed by their reference counts. Only cycles among them are never found, and what exists
    now lives as long as the run; `megatron_torn_down`, which ends a model before its process, unfreezes them, as vLLM's
    shutdown does. Objects of steps are created later, so cycles among those are collected as before.
    """
    gc.collect()
    gc.freeze()

"""The protocol between trainer and rollout server. Both import this folder; it needs torch and numpy only.

    api_key.py         where the API key is read from, and how it stays out of process lists
    messages.py        HTTP routes, status codes and JSON messages
    routed_experts.py  rows of experts as compressed JSON, and back within bounds
    model_identity.py  values of config.json in which both must agree
    rendezvous.py      admits processes that have a secret, and shares the keys of their stores
    channel.py         a process group that carries weights to the workers of one server
    buckets.py         packs many tensors into one flat tensor
    stacked_tensors.py  tensors that are evenly spaced in one memory, as one tensor
    held_weights.py    checksums of the weights that an engine holds

Tests: tests/unit/protocol, tests/unit/loop/test_weight_sync.py.
"""

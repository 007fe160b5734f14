"""vLLM behind one or more `swift rollout` servers. Rank 0 alone contacts them.

engine.py             the engine: start-up checks, weights, shutdown
servers.py            the servers of a run: which are alive, and with which weights; the event loop that polls them
compatibility.py      why a server cannot serve a run, and what to do about it
generation.py         one generation: send requests, retry lost ones, return completed groups
dispatcher.py         which server gets which request, and which requests were lost with a server
completion_checks.py  completions that no engine of this run can have generated
client.py             HTTP to one server, with images that are sent once
weight_sender.py      weights to the servers, in buckets
gateways.py           weights from several machines: which rank sends to which server
teacher.py            a teacher's log-probs, from any vLLM server

Tests: tests/unit/generation/remote, tests/unit/weights/transport/test_channel.py, tests/e2e/test_server.py,
tests/e2e/test_gateways.py.
"""

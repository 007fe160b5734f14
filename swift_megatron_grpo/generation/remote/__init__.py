"""vLLM behind one or more `swift rollout` servers. Rank 0 alone contacts them.

engine.py                 the engine: start-up checks, weights, shutdown
servers.py                the servers of a run: which are alive, and with which weights
generation.py             one generation: send requests, retry lost ones, return completed groups
completion_checks.py      completions that no engine of this run can have generated
dispatcher.py             which server gets which request
lost_requests.py          requests lost with a server, until all are completed again
client.py                 HTTP to one server
image_uploads.py          images on their way to one server, each once
weight_sender.py          weights to the servers, in buckets
conversation_settings.py  conflicts between the multi-turn flags of the run and of the servers
vision_tower_conflicts.py conflicts between servers about the vision tower
event_loop.py             an asyncio event loop in its own thread

Tests: tests/unit/generation/remote, tests/unit/weights/transport/test_channel.py, tests/e2e/test_server.py.
"""

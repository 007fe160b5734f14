"""Rollout server: `swift rollout` with additional routes for this package's trainer.

The web server and the engine are two processes; on one device vLLM's engine is a thread of the second.

__main__.py         entry point: `python -m swift_megatron_grpo.generation.server`
arguments.py        the flags of `swift rollout`, with other defaults
signals.py          SIGTERM and SIGINT end the server with all of its processes
deploy.py           starts the engine process and the web server; ms-swift's own routes
routes.py           this package's routes, their responses in parts, and the lease of the run that has the server
gate.py             what every request passes first: limits on connections and size, key, content
schema.py           types, ranges and sizes of all requests
health.py           detects an engine that generates nothing
pipe.py             commands between the web server and the engine process
engine_process.py   builds vLLM's engine and executes commands: completions; keeps images by digest
engine_thread.py    vLLM's engine in a thread of that process
weight_receiver.py  extension of vLLM's workers: receives and loads weights

Tests: tests/unit/generation/server; with a real server: tests/e2e/test_server.py, tests/e2e/test_server_turns.py.
"""

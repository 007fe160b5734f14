"""Rollout server: `swift rollout` with additional routes for this package's trainer.

__main__.py              entry point: `python -m swift_megatron_grpo.generation.server`
arguments.py             the flags of `swift rollout`, with other defaults
end_at_signals.py        SIGTERM and SIGINT end the server with all of its processes
ignore_interrupts.py     SIGINT ends no other process of the server by itself
deploy.py                the web server: routes, weight versions, access
limits.py                the limits on connections, bodies and prompts
connections.py           the limits on connections, in uvicorn's protocol
gate.py                  what every request passes first: key, size, content
schema.py                types, ranges and sizes of all requests
image_store.py           images that the trainer has sent, by digest
stock_routes.py          ms-swift's own routes, one at a time
health.py                detects an engine that generates nothing
prober.py                generates the token that health.py waits for
run_lease.py             the lease that gives one run at a time the server
cancel_on_disconnect.py  cancels work for clients that have disconnected
pipe.py                  commands between the web server and the engine process
worker.py                the engine process: builds vLLM's engine and executes commands
engine_thread.py         vLLM's engine in a thread of that process
batch.py                 the answers to a batch of requests, each as soon as it is known
completions.py           generates one completion
conversations.py         runs one multi-turn conversation with ms-swift's scheduler
weight_receiver.py       extension of vLLM's workers: receives and loads weights

Tests: tests/unit/generation/server; with a real server: tests/e2e/test_server.py, tests/e2e/test_server_turns.py.
"""

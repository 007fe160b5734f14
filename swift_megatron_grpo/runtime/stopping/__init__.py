"""A run stops on SIGTERM or SIGINT: it ends the current step, saves a checkpoint and exits with 128 + the signal.

signals.py      receives the signals at once, even while the main thread is in C code; ends helpers with their rank
request.py      the request to stop, exchanged between ranks; decides when a step is given up; the last line

plugin/activation.py and plugin/torchrun.py pass signals on. The loop asks for the request before every step; generation
and grading ask whether to give up. Tests: tests/unit/runtime/stopping, tests/e2e/test_stop.py.
"""

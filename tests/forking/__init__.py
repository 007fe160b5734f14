"""Start test processes by fork from a process that has imported everything, which saves 20 s each.

`server.py` is the preloaded process, `programs.py` what it can run, `client.py` what tests call.
"""

"""Start test processes by fork from a process that has imported everything, which saves 20 s each.

`server.py` is the preloaded process, `programs.py` its imports and programs, `client.py` the functions that tests call.
"""

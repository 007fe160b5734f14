"""Tests, a package so that no installed distribution with a folder named `tests` hides it.

unit       one process; its folders mirror the package
contract   what this package relies on in ms-swift, mcore-bridge, megatron-core and vLLM; the wheel
dist       several ranks over gloo
e2e        the command line as a user runs it
gpu        on request, with GPUs
stress     long runs with faults, started by hand
programs   what other processes run for these tests, in a folder for each: tasks of ranks, external plugins, scripts
fakes      stages and ranks without processes, for unit tests of what calls them
support    what tests import to start such processes and to read their results
forking    preloaded processes that ranks, servers and pytest's workers are forked from
golden     recorded steps
scripts    published scripts of ms-swift, verl, slime and others

A folder of tests holds test files and conftest.py only. A helper goes to `programs` if another process runs it, else to
`support`; the stand-ins of a single unit test stay next to it.

vLLM caches the processor of a model by its folder: two models in one process need two folders.
"""

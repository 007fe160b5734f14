"""Tests, a package so that no installed distribution with a folder `tests` of its own takes its name."""

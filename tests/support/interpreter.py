"""Run code in a separate process that has imported ms-swift, Megatron and vLLM, but not this package's plugin."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from tests.forking.client import run_code

PREAMBLE = """
import inspect, json, sys
import torch

def parameters(function):
    return list(inspect.signature(function).parameters)

def source(function):
    return inspect.getsource(function)
"""


def result_of(code: str) -> Any:
    """Run the code after PREAMBLE and return what it assigns to `result`, through JSON."""
    return printed_result(PREAMBLE + textwrap.dedent(code) + "\nprint('RESULT ' + json.dumps(result))\n")


def printed_result(code: str) -> Any:
    """Run the code and return what it prints as JSON after the word RESULT."""
    return json.loads(run_code("upstream", code).rsplit("RESULT ", 1)[1].splitlines()[0])

"""Read YAML that may come from anywhere: nothing in it runs, and what it expands to is bounded."""

from itertools import chain
from typing import Any

import yaml

MOST = 300_000  # characters of a file, and of the settings that it expands to
_MOST_DIGITS = 30
_NOT_YAML = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of yaml's types


def parse_yaml(text: str) -> Any:
    """Parse YAML. Raises ValueError if it is not YAML, or if it grows when its aliases are written out."""
    try:
        tree = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error
    if tree is None:
        return None
    if _size(tree, {}) > MOST:
        raise ValueError(f"its aliases have more than {MOST:,} characters, or contain themselves")
    try:
        return yaml.SafeLoader("").construct_document(tree)
    except _NOT_YAML as error:
        raise ValueError(f"a value is not what its YAML type says: {error}") from error


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many characters a tree has when its aliases are written out; an alias costs no time here."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST + 1  # if it contains itself
        if isinstance(node, yaml.ScalarNode):
            if node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
                raise ValueError(f"a number has {len(node.value)} digits")
            sizes[id(node)] = 1 + len(node.value)
        else:
            parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = min(1 + sum(_size(part, sizes) for part in parts), MOST + 1)
    return sizes[id(node)]

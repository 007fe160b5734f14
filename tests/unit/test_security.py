"""Facts that docs/security.md states about the whole package, and the tests that the page names."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "swift_megatron_grpo"
PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
TESTS = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# Results of writers that a rank has forked itself, which upstream reads in the same way, and what ranks of one trainer
# exchange, packed before the exchange that would pack it.
UNPICKLES = {"training/upstream_fixes/result_queue.py", "runtime/parallel.py"}
# What reads pickled data, by file: the ranks of one trainer among themselves, and files of their own.
READS_PICKLED_DATA = {
    "training/engine.py": {"all_gather_object", "broadcast_object_list"},
    "data/encoded_rows.py": {"all_gather_object"},
    "arguments/resume.py": {"all_gather_object"},
    "generation/local/conversations.py": {"broadcast_object_list"},
    "cli/check_layouts/command.py": {"load"},  # what its own ranks have written, with weights_only
}
LISTENERS = {"create_server", "start_server", "bind", "HTTPServer", "TCPServer", "TCPStore", "TCPSite"}
LISTENS = {
    "weights/transport/rendezvous.py": {"create_server"},
    "generation/conversations/proxy.py": {"create_server"},  # 127.0.0.1 alone
    "launch/on_machines.py": {"TCPStore"},  # whose values are signed
    "runtime/machines.py": {"TCPStore"},  # a client: it does not listen
    # look whether a port is free, and close it
    "cli/doctor/command.py": {"create_server"},
    "generation/server/arguments.py": {"create_server"},
    "launch/child.py": {"create_server"},
}
SECRET = re.compile(r"secret|api_key|^_key$|^mac$|^proof$")


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.AST) -> str | None:
    """Return the last name of the function that a call calls."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def reads_pickled_data(node: ast.AST) -> str | None:
    name = called(node)
    if name is None or not isinstance(node, ast.Call):
        return None
    is_collective = re.fullmatch(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?", name) is not None
    of_torch_or_numpy = name == "load" and re.match(r"(torch|np|numpy)\.", ast.unparse(node.func)) is not None
    takes_pickles = any(keyword.arg in ("allow_pickle", "pickle_module") for keyword in node.keywords)
    from_connection = name == "recv" and not node.args  # of multiprocessing; a socket's takes a size
    return name if is_collective or of_torch_or_numpy or takes_pickles or from_connection else None


def test_nothing_that_a_server_or_its_trainer_receives_is_unpickled() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in files():
        for node in ast.walk(tree):
            assert not imported(node) & UNPICKLERS or name in UNPICKLES, f"{name} imports {imported(node)}"
            if (call := reads_pickled_data(node)) is not None:
                found.setdefault(name, set()).add(call)
    assert found == READS_PICKLED_DATA


def test_only_the_rendezvous_and_the_web_servers_listen() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in files():
        for node in ast.walk(tree):
            if (call := called(node)) in LISTENERS and "inspect.signature(" not in ast.unparse(node):
                found.setdefault(name, set()).add(str(call))
    assert found == LISTENS


def test_secrets_are_compared_in_constant_time() -> None:
    """No `==`, `!=` or `in` compares a key, a secret or a proof; hmac.compare_digest does."""
    compared, seen = [], set()
    for name, tree in files():
        if not name.startswith(("generation/server/", "generation/protocol/", "weights/transport/")):
            continue
        seen.add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In):
                names = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
                         for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)}  # fmt: skip
                if any(SECRET.search(part) for part in names) and "compare_digest" not in names:
                    compared.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert "generation/server/gate.py" in seen
    assert not compared, "\n".join(compared)


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [("0.0.0.0", None, True), ("", None, True), ("10.0.0.7", None, True), ("127.0.0.1", None, False), ("", "k", False)],
)
def test_a_server_that_listens_beyond_loopback_without_a_key_warns(
    host: str, key: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from swift.utils import get_logger

    from swift_megatron_grpo.generation.server.deploy import GRPORolloutDeploy

    server = object.__new__(GRPORolloutDeploy)
    server.args = SimpleNamespace(host=host, port=8000, api_key=key)
    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.INFO):
        server._warn_if_unauthenticated()
    get_logger().removeHandler(caplog.handler)
    assert ("without an API key" in caplog.text) == warns
    assert ("listens on 127.0.0.1 only" in caplog.text) == (host == "127.0.0.1")


def test_every_test_that_the_page_names_exists() -> None:
    named = TESTS.findall(PAGE)
    assert len(named) > 30
    for file, test in named:
        source = Path(REPOSITORY, file).read_text(encoding="utf-8")
        functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert any(name.startswith("test_") for name in functions), file
        assert not test or test in functions, f"{file}::{test}"


def test_every_statement_of_the_page_has_a_test() -> None:
    """Each row of the tables with a column `test` names one; each line of prose is a statement of such a row."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    with_tests = PAGE[PAGE.index("| statement | test |") :]
    statements = [row for row in rows if row in with_tests and row != "| statement | test |"]
    assert len(statements) > 30
    assert [row for row in statements if not TESTS.search(row)] == []

"""The runner of the clients: that its table is whole, and that it calls a wrong verdict wrong. The clients run in tox's `clients`."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[1] / "benchmarks" / "clients"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(CLIENTS))
    yield importlib.import_module("run"), importlib.import_module("clients")
    for name in ("run", "clients"):
        del sys.modules[name]


def test_each_client_and_each_gate_is_there(modules):
    _, clients = modules
    names = [client.name for client in clients.CLIENTS]
    assert len(set(names)) == len(names) >= 20
    scripts = {path.name for path in (CLIENTS / "programs").glob("*.py")}
    assert {client.script for client in clients.CLIENTS} == scripts - {"gates.py"}
    tree = ast.parse((CLIENTS / "programs" / "gates.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert {name.partition("[")[0] for name in clients.GATES} == tests


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        ((3, ("bread",)), ""),
        ((0, ("bread",)), "exit code 3 instead of 0"),
        ((3, ("wine",)), "'wine' is not said"),
        ((3, (), ("water",)), "'water' is said"),
    ],
)
def test_a_wrong_verdict_is_called_wrong(modules, expected, wrong, tmp_path, capsys):
    run, clients = modules
    command = [sys.executable, "-c", "print('bread and water'); raise SystemExit(3)"]
    done = run.verdict(clients.Expected(*expected), command, tmp_path, quiet=False)
    assert done.wrong == wrong and str(done).startswith("WRONG" if wrong else "right")
    assert ("bread and water" in capsys.readouterr().out) == bool(wrong)

"""The runner of the clients: that its table is whole, and that it calls a wrong verdict wrong.

The clients run in tox's `clients`.
"""

from __future__ import annotations

import ast
import importlib
import sys
import xml.etree.ElementTree as ET
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
    files = {gate.file for gate in clients.GATES}
    assert {client.script for client in clients.CLIENTS} == scripts - {f"{file}.py" for file in files}
    for file in files:
        body = ast.parse((CLIENTS / "programs" / f"{file}.py").read_text()).body
        tests = {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        assert {gate.test.partition("[")[0] for gate in clients.GATES if gate.file == file} == tests
    assert {gate.of for gate in clients.GATES} - {""} <= set(names)
    page = (CLIENTS.parents[1] / "docs" / "how-to" / "megatron.md").read_text()
    assert (CLIENTS / "programs" / "gates_megatron_page.py").read_text() in page  # so the page's example is run


PASSES = "<testcase time='2'/>"
NAMED = """<testcase time='3'>
<properties><property name='mgpu_check.mistakes' value='mean-of-means world-size-factor'/></properties>
<failure message='m'>ScalingMismatch: 1 of 2 results differ</failure></testcase>"""
RAISES = "<testcase time='4'><failure message='m'>RankFailure: Duplicate GPU detected</failure></testcase>"


@pytest.mark.parametrize(
    ("expected", "case", "wrong"),
    [
        ({}, PASSES, ""),
        ({}, NAMED, "the gate says 'mean-of-means', and not: passes"),
        ({}, RAISES, "the gate fails, and not: passes"),
        ({"mistake": "mean-of-means"}, PASSES, "the gate passes, and not: fails: mean-of-means"),
        ({"mistake": "world-size-factor"}, NAMED, "the gate says 'mean-of-means', and not: fails: world-size-factor"),
        ({"words": "Duplicate GPU"}, RAISES, ""),
        ({"words": "No backend"}, RAISES, "the gate fails, and not: fails: No backend"),
        ({}, None, "it was not run"),
    ],
)
def test_what_the_gate_says_is_judged(modules, expected, case, wrong):
    run, clients = modules
    done = run.judged(clients.Gate("test_it", **expected), None if case is None else ET.fromstring(case))
    assert done.wrong == wrong and bool(done.seconds) == (case not in (None, "") and "time" in case)

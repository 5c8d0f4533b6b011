"""The options of an agent, which is no pytest process, by pytest's own rules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mgpu_check.cli.launcher import settings_of
from mgpu_check.settings import resolve

VARIABLE = "MGPU_CHECK_AGENT_KEY_FILE"
SUITE = ("--gpus=4",)
PYTEST = ("pytest", "test_it.py")


@pytest.mark.parametrize(
    ("arguments", "environment", "ini", "expected"),
    [
        (PYTEST, {}, "", (None, False, None, 300.0)),
        ((*PYTEST, "--agent-key-file=/a"), {VARIABLE: "/b"}, "agent_key_file = /c", ("/a", False, None, 300.0)),
        (PYTEST, {VARIABLE: "/b"}, "agent_key_file = /c", ("/b", False, None, 300.0)),
        (PYTEST, {}, "agent_key_file = /c\nsimulate = true\ngpus = 2", ("/c", False, "cpu", 300.0)),
        (PYTEST, {VARIABLE: ""}, "agent_key_file = /c\ntrust_network = yes", (None, True, None, 300.0)),
        (PYTEST, {}, "addopts = --trust-network --agent-timeout=7", (None, True, None, 7.0)),
        (PYTEST, {"PYTEST_ADDOPTS": "--agent-key-file=/d"}, "", ("/d", False, None, 300.0)),
        (PYTEST, {"MGPU_CHECK_TRUST_NETWORK": "1"}, "", (None, True, None, 300.0)),
        # The suite does not read the ini file of the directory.
        (SUITE, {VARIABLE: "/b"}, "agent_key_file = /c\ntrust_network = yes", ("/b", False, None, 300.0)),
        (("selftest", "--agent-key-file=/a"), {}, "", ("/a", False, None, 300.0)),
        # The driver reports a wrong value, once.
        ((*PYTEST, "--rank-timeout=never"), {VARIABLE: "/b"}, "", (None, False, None, 300.0)),
        ((*PYTEST, "-p", "no_such_plugin"), {}, "", (None, False, None, 300.0)),
        ((*PYTEST, "--trust-network", "--agent-key-file=/a"), {}, "", (None, False, None, 300.0)),
    ],
)
def test_they_are_those_of_the_run(arguments, environment, ini, expected, tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    (tmp_path / "conftest.py").write_text("raise AssertionError('an agent runs no code of the tests')")
    monkeypatch.chdir(tmp_path)
    for name in (VARIABLE, "MGPU_CHECK_TRUST_NETWORK", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ), list(sys.meta_path)
    found = settings_of(arguments)
    assert (found.agent_key_file, found.trust_network, found.simulate, found.agent_timeout) == expected
    assert (dict(os.environ), list(sys.meta_path)) == before
    assert "".join(capfd.readouterr()) == ""


def test_a_key_file_and_a_trusted_network_exclude_each_other():
    with pytest.raises(
        ValueError, match=r"^--trust-network: .*environment variable MGPU_CHECK_AGENT_KEY_FILE names /a; choose"
    ):
        resolve({"trust_network": "true"}, {VARIABLE: "/a"}, {})
    assert not resolve({"trust_network": "false"}, {VARIABLE: "/a"}, {}).trust_network

"""Scripts as people write them, and the command that compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from tests.conftest import processes_with
from tests.docs.pages import DOCS, first_files
from tests.warm import COMPARED_ON_ONE_DEVICE

MARK = "_MGPU_CHECK_TEST_OF_COMPARE"
IMPORTED = (  # by each process of a script
    "mgpu_check.compare.in_script.recorder",
    "mgpu_check.compare.comparison",
    "mgpu_check.simulated.activation",
    "mgpu_check.torch_hooks.collectives",
    "mgpu_check.engine.rank_side.state",
)

# The script of the page is what it says: comparable.
TUTORIAL = first_files(DOCS / "how-to" / "compare.md")["train.py"]

SCRIPTS = Path(__file__).parent / "scripts"


def script(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


@dataclass
class Outcome:
    code: int
    text: str
    """The text that the command wrote to its terminal."""
    json: dict[str, Any]
    html: str
    """The page; empty unless it was asked for."""


@pytest.fixture
def surroundings(tmp_path_factory, monkeypatch):
    """Of the command: nothing of this run's; and, when the test has ended, no process of it, and no temporary file."""
    for name in list(os.environ):
        if name.startswith(("MGPU_CHECK_", "PYTEST_")):
            monkeypatch.delenv(name)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(MARK, str(temporary))
    yield
    deadline = time.monotonic() + 15
    while (left := processes_with(MARK, str(temporary))) and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel takes a moment to end what it was told to
    assert left == {}
    # Files that torch keeps there for later processes belong to the script.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


Begin = Callable[..., Any]
"""``begin(words, stdout, stderr, processes=N)``: start ``python WORDS...``, which may start N processes of a script."""
Python = Callable[..., tuple[int, bytes, bytes]]
"""``python(*words, processes=N)``: run it like `Begin`; exit code, and what it wrote to standard output and error."""


@pytest.fixture
def begin(request, tmp_path, surroundings, template) -> Begin:
    """Start a Python: it and the processes of the script are forked from a process that has imported torch.

    With the marker `cold`, or --cold, all of them are interpreters that import it themselves, as users have it.
    """
    cold = request.config.getoption("cold") or request.node.get_closest_marker("cold") is not None

    def begin(words: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], *, processes: int) -> Any:
        if cold:
            return subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=stdout, stderr=stderr)
        more = {"program": words[:2], "standbys": processes, "imports": IMPORTED, "directory": tmp_path}
        return template.popen(words[2:], os.environ, stdout.fileno(), stderr.fileno(), **more)

    return begin


@pytest.fixture
def python(begin: Begin) -> Python:
    def python(*words: str, processes: int) -> tuple[int, bytes, bytes]:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            code = begin(words, stdout, stderr, processes=processes).wait()
            stdout.seek(0)
            stderr.seek(0)
            return code, stdout.read(), stderr.read()

    return python


@pytest.fixture
def compare(tmp_path, python):
    """Write `script`, compare what it does, and give the outcome; `code` is what the command is to exit with.

    Other comparisons than of ranks with one device run `more` processes. A `page` takes a second of drawing.
    """

    def compare(
        script: str, *options: str, code: int, arguments: Sequence[str] = (), more: int = 0, page: bool = False
    ) -> Outcome:
        tmp_path.joinpath("train.py").write_text(textwrap.dedent(script))
        before = sorted(path.name for path in tmp_path.iterdir() if path.name not in ("out.json", "out.html"))
        ranks = next((int(option.partition("=")[2]) for option in options if option.startswith("--gpus=")), 2)
        words = (*options, "--json=out.json", *["--html=out.html"] * page, "--", "train.py", *arguments)
        exited, stdout, stderr = python(
            "-m", "mgpu_check", "compare", *words, processes=ranks + COMPARED_ON_ONE_DEVICE + more
        )
        text = (stdout + stderr).decode()
        assert exited == code, text
        assert sorted(p.name for p in tmp_path.iterdir() if p.name not in ("out.json", "out.html")) == before
        html = Path(tmp_path, "out.html").read_text() if page else ""
        return Outcome(code, text, json.loads(Path(tmp_path, "out.json").read_text()), html)

    return compare


@pytest.fixture
def tutorial(tmp_path):
    """The tutorial's script, beside the checkpoint that it begins with."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    torch.save(net.state_dict(), tmp_path / "start.pt")
    return TUTORIAL


@pytest.fixture
def by_hand():
    """A script that uses torch.distributed for more than one rank only, and averages gradients itself."""
    return script("by_hand")


@pytest.fixture
def changed():
    """`script` with one passage replaced, which must be there once."""

    def changed(script: str, *replacements: tuple[str, str]) -> str:
        for old, new in replacements:
            assert script.count(old) == 1, old
            script = script.replace(old, new)
        return script

    return changed

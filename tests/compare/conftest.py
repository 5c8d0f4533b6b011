"""Scripts as people write them, and the command that compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import processes_with
from tests.docs.pages import DOCS, first_files

MARK = "_MGPU_CHECK_TEST_OF_COMPARE"

# The script of the page is what it says: comparable.
TUTORIAL = first_files(DOCS / "how-to" / "compare.md")["train.py"]

BY_HAND = """\
import os
import torch, torch.distributed as dist
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(24, 6)
y = x.sum(1, keepdim=True).sin() * 3
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for start in (0, 8, 16):
    part = slice(start + rank, start + 8, world)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x[part]), y[part])
    loss.backward()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
"""


@dataclass
class Outcome:
    code: int
    text: str
    """What the command wrote to its terminal."""
    json: dict[str, Any]
    html: str


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
    # What torch keeps there for later processes is the script's.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.fixture
def compare(tmp_path, surroundings):
    """Write `script`, compare what it does, and give the outcome; `code` is what the command is to exit with."""

    def compare(script: str, *options: str, code: int, arguments: Sequence[str] = ()) -> Outcome:
        tmp_path.joinpath("train.py").write_text(textwrap.dedent(script))
        before = sorted(path.name for path in tmp_path.iterdir() if path.name not in ("out.json", "out.html"))
        ran = subprocess.run(
            [sys.executable, "-m", "mgpu_check", "compare", *options, "--json=out.json", "--html=out.html", "--", "train.py",
             *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        text = ran.stdout + ran.stderr
        assert ran.returncode == code, text
        assert sorted(p.name for p in tmp_path.iterdir() if p.name not in ("out.json", "out.html")) == before
        return Outcome(
            code, text, json.loads(Path(tmp_path, "out.json").read_text()), Path(tmp_path, "out.html").read_text()
        )

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
    return BY_HAND


@pytest.fixture
def changed():
    """`script` with one passage replaced, which must be there once."""

    def changed(script: str, *replacements: tuple[str, str]) -> str:
        for old, new in replacements:
            assert script.count(old) == 1, old
            script = script.replace(old, new)
        return script

    return changed

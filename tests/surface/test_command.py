"""`python -m tests.surface`, as a maintainer calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a maintainer's command
ROOT = Path(__file__).parents[2]
SELECTED = (
    "--gpus=2",
    "--simulate",
    "--gpu-level=quick",
    "test_mismatch.py",
    "-k",
    "test_data_parallel_wants_its_first_device",
)


def surface(directory: Path, *arguments: str, code: int) -> str:
    """Run the command in a directory, and return its output."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.surface", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_the_command_lists_what_a_run_never_draws_and_continues_its_record(tmp_path):
    text = surface(tmp_path, "--record=record.json", *SELECTED, code=1)
    assert "1 passed" in text
    row = next(line for line in text.splitlines() if line.startswith("all  "))
    functions, called, variants, drawn, left_out, undrawn = map(int, row.split()[1:])
    assert functions > called > 0 and drawn + left_out + undrawn == variants
    assert undrawn > 0 and "\nundrawn:\n" in text
    record = tmp_path / "record.json"
    content = json.loads(record.read_text())
    assert content["drawn"]["torch.nn.parallel.DataParallel"][""] == ["called"]
    content["drawn"]["torch.distributed.frobnicate"] = {"": ["called"]}
    record.write_text(json.dumps(content))
    surface(tmp_path, "--record=record.json", *SELECTED, code=1)
    assert "torch.distributed.frobnicate" in json.loads(record.read_text())["drawn"]


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes")
    text = surface(tmp_path, "--record=notes.txt", *SELECTED, code=4)
    assert "--record=notes.txt: it holds no record of a surface" in text
    assert (tmp_path / "notes.txt").read_text() == "my notes"


@pytest.mark.parametrize(
    ("words", "why"),
    [(("-n", "2"), "leave out -n"), (("--record=",), "--record has an empty value"), (("--record",), "needs a value")],
)
def test_wrong_arguments_are_refused(tmp_path, words, why):
    assert why in surface(tmp_path, *SELECTED, *words, code=4)

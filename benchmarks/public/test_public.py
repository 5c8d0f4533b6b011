"""Compare public scripts, unmodified and with mistakes: ``pytest benchmarks/public -s --checkouts=… --packages=…``.

The directory of the option ``--checkouts`` has one for each repository, as `public.SCRIPTS` names them: their code is no
part of this project. ``--packages`` is a directory with a folder ``lib`` of what they import. Each script runs on tiny
random data, under ``mgpu-check simulate`` and ``mgpu-check compare``, and then with one mistake at a time.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from data import MAKERS, SHIM
from public import SCRIPTS, Mistake, Script

OURS = [sys.executable, "-m", "mgpu_check"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
LONGEST = 3600.0  # seconds, for a script that hangs: four runs on busy processors take long
NAMED = [pytest.param(script, id=script.name.replace(" ", "-")) for script in SCRIPTS]
PLANTED = [
    pytest.param(script, mistake, id=f"{script.name}: {mistake.name}".replace(" ", "-"))
    for script in SCRIPTS
    for mistake in script.mistakes
]


class Laid:
    """Copies of a checkout, with its data."""

    def __init__(self, script: Script, directory: Path, checkouts: Path, packages: Path) -> None:
        self.script = script
        self.data, self.code, shims = directory / "data", directory / "code", directory / "shims"
        shims.mkdir()
        (shims / "sitecustomize.py").write_text(SHIM)
        MAKERS[script.data](self.data)
        shutil.copytree(checkouts / script.checkout, self.code)
        for name, text in script.files.items():
            (self.code / name).write_text(self.filled(text))
        folders = [packages / script.packages] * bool(script.packages) + [packages / "lib"]
        path = [shims, *(self.code / part for part in script.path), *folders]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MGPU_CHECK_", "PYTEST_", "CUDA_VISIBLE"))}
        self.environment = {
            **kept,
            **{name: self.filled(value) for name, value in script.environment.items()},
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def filled(self, text: str) -> str:
        return text.replace("@", str(self.data))

    def plant(self, mistake: Mistake) -> None:
        file = self.code / mistake.file
        text = file.read_text()
        assert text.count(mistake.old) == 1, f"{mistake.old!r} occurs {text.count(mistake.old)} times in {mistake.file}"
        file.write_text(text.replace(mistake.old, mistake.new))

    def run(self, *command: str) -> tuple[int, str]:
        """Run the command with the script, print its report and processor seconds, and return exit code and output."""
        before = _processor_seconds()
        ran = subprocess.run(
            [*OURS, *command, *shlex.split(self.filled(self.script.command))],
            cwd=self.code,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LONGEST,
        )
        print(f"\n{ran.stdout}\n{_processor_seconds() - before:.0f} s of processor time")
        return ran.returncode, ran.stdout

    def compare(self, code: int, words: Sequence[str]) -> None:
        found, text = self.run("compare", "--gpus=2", "--simulate", "--steps=2", *self.script.options, "--")
        assert found == code
        assert [word for word in words if word not in text] == []


def _processor_seconds() -> float:
    """Return the processor time of all processes that have ended, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def lay(request, tmp_path):
    checkouts, packages = (request.config.getoption(name) for name in ("checkouts", "packages"))
    if checkouts is None or packages is None:
        pytest.skip("public scripts need --checkouts=DIRECTORY and --packages=DIRECTORY")
    sys.path.append(str(packages / "lib"))  # to make the data
    return lambda script: Laid(script, tmp_path, checkouts, packages)


@pytest.mark.parametrize("script", NAMED)
def test_simulate(lay, script):
    code, _ = lay(script).run("simulate", "--gpus=2", "--", *TORCHRUN)
    assert code == 0


@pytest.mark.parametrize("script", NAMED)
def test_compare(lay, script):
    lay(script).compare(script.code, script.words)


@pytest.mark.parametrize(("script", "mistake"), PLANTED)
def test_mistake(lay, script, mistake):
    laid = lay(script)
    laid.plant(mistake)
    laid.compare(1, mistake.words)

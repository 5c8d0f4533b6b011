"""What keeps ranks from starting is said once, in one sentence, with the remedy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_check
from mgpu_check.engine.launcher import opening_files
from mgpu_check.errors import StartupFailure

HOME = str(Path(mgpu_check.__file__).parent.parent)
GPUS = ("--gpus=2", "--simulate")
TESTS = """
    import pytest

    @pytest.mark.ranks(2)
    def test_rank(rank): pass

    def test_ranks(ranks): ranks.run(print)

    def test_gpus(gpus): pass
"""
WITHOUT_TORCH = """
    import importlib.util, sys

    class Finder:
        def find_spec(self, name, *rest):
            if name == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name=name)

    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def start(pytester):
    """Run a command in a new interpreter, whose torch is that of this directory, if there is one."""

    def start(*words):
        environment = {**os.environ, "PYTHONPATH": f"{pytester.path}:{HOME}"}
        command = [sys.executable, "-m", *words]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
        return ran.returncode, ran.stdout + ran.stderr

    pytester.makepyfile(test_it=TESTS)
    return start


@pytest.mark.parametrize(
    "words",
    [
        ("pytest", *GPUS),
        ("mgpu_check", "devices"),
        pytest.param(("pytest", *GPUS, "-n1"), marks=pytest.mark.slow),
        pytest.param(("mgpu_check", *GPUS), marks=pytest.mark.slow),
        pytest.param(("mgpu_check", "selftest", "test_scatter.py"), marks=pytest.mark.slow),
    ],
)
def test_without_torch_one_line_says_so(start, pytester, words):
    pytester.makepyfile(sitecustomize=WITHOUT_TORCH)
    code, text = start(*words)
    assert code == 4 and "Traceback" not in text
    assert text.count("torch is not installed for") == 1 and "install torch 2.11 or newer there" in text


def torch(pytester, source):
    (pytester.path / "torch").mkdir()
    (pytester.path / "torch" / "__init__.py").write_text(source)


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported_ends_the_run(start, pytester):
    torch(pytester, "raise ImportError('libcudart.so: cannot open shared object file')")
    code, text = start("pytest", *GPUS)
    assert code == 1 and text.count("ranks cannot import a module: ImportError: libcudart.so: cannot open") == 1
    assert "no rank can start, because an import fails" in text and "1 failed" in text


@pytest.mark.slow
@pytest.mark.parametrize("test", ["test_rank", *(test for test in ("test_ranks", "test_gpus"))])
def test_a_time_limit_that_ends_during_the_start(start, pytester, test):
    pytest.importorskip("pytest_timeout")
    torch(pytester, "import time; time.sleep(100)")
    code, text = start("pytest", *GPUS, "--timeout=1", "-k", test)
    assert code == 1 and "Timeout (>1.0s) from pytest-timeout.\n" in text
    assert "ranks were still starting; the first test with ranks waits until torch is imported" in text
    assert "mgpu_check/" not in text


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "Too many open files. Raise this limit of the shell, which is .* now: ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENOSPC, "Make room in /.*, or name another directory by the environment variable TMPDIR"),
    ],
)
def test_what_the_operating_system_refuses(number, remedy):
    with pytest.raises(StartupFailure, match=remedy), opening_files():
        raise OSError(number, "refused")
    with pytest.raises(FileExistsError), opening_files():
        raise FileExistsError(errno.EEXIST, "another error")


def test_too_few_open_files(start, pytester):
    pytester.makepyfile(
        program="""
        import os, resource
        from mgpu_check.engine.launcher import LocalLauncher
        from mgpu_check.errors import StartupFailure

        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 100))
        try:
            LocalLauncher().start()
        except StartupFailure as error:
            print(error)
        """
    )
    code, text = start("program")
    assert code == 0 and "the files of ranks cannot be opened: Too many open files." in text and "ulimit -n" in text

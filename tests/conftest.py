"""Shared by the tool's own tests."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from mgpu_check.plugin.requirements import Needs, needs_of
from mgpu_check.processes.heap import freeze

os.environ.pop("GITHUB_ACTIONS", None)  # with it, runs print annotations
os.environ.pop("PYTHONHASHSEED", None)  # tox sets it, and gates then try no other

settings.register_profile("without deadlines", parent=settings.default, deadline=None)
settings.load_profile("without deadlines")  # other tests may keep the processors busy

if TYPE_CHECKING:
    from tests.warm import Template


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Processes that were started with `value` in `variable`, even if they have changed their environment; pid -> name."""
    from tests.warm import STANDBY

    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            except OSError:
                continue
            if (
                name != STANDBY
                and f"{variable}={value}".encode() in environment.split(b"\0")
                and rest.split()[0] != "Z"
            ):
                found[int(entry.name)] = name
    return found


os.environ.setdefault("_MGPU_CHECK_RAISE", "1")  # our tests must see an error of a diagnosis: `diagnosis/report.py`

INI = Path(__file__).parents[1] / "pytest.ini"
ENVIRONMENT = dict(os.environ)  # of now, and not of the test that is the first to ask for the template


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start a new interpreter for every inner run of pytest")


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    from tests.warm import Template  # here: runs of the packaged suite in this repository read this file, too

    template = Template(ENVIRONMENT)
    yield template
    template.close()


@pytest.fixture
def warm(
    request: pytest.FixtureRequest, pytester: pytest.Pytester, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let `pytester` fork the runs of pytest that it starts, where that makes no difference to them."""
    if not request.config.getoption("cold"):
        fork_runs(pytester, template, monkeypatch)


@pytest.fixture
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: Template
) -> Callable[..., str]:
    """Run `mgpu-check`, or another module, from a directory that is not the checkout; what it has printed."""
    for name in list(os.environ):
        if name.startswith(("MGPU_CHECK_", "PYTEST_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")

    def command(*arguments: str, code: int = 0, program: str = "mgpu_check") -> str:
        module = ("-m", program)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = (
                subprocess.Popen([sys.executable, *module, *arguments], cwd=tmp_path, stdout=out, stderr=errors)
                if request.config.getoption("cold")
                else template.popen(
                    arguments, os.environ, out.fileno(), errors.fileno(), program=module, directory=tmp_path
                )
            )
            try:
                returned = process.wait(300.0)
            finally:
                process.kill()
            out.seek(0)
            errors.seek(0)
            output = out.read() + errors.read()
        assert returned == code, output
        return output

    return command


def fork_runs(pytester: pytest.Pytester, template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `pytester` fork from `template` the programs in Python that fit it."""
    from tests.warm import program_of

    start = pytester.popen

    def popen(command: Sequence[str], stdout: Any, stderr: Any, stdin: Any, **options: Any) -> Any:
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))  # as `pytester` does
        environment = {**os.environ, "PYTHONPATH": path}
        if options or stdin is not pytester.CLOSE_STDIN or not template.fits(command, environment):
            return start(command, stdout=stdout, stderr=stderr, stdin=stdin, **options)
        program, arguments = program_of(command)
        return template.popen(arguments, environment, stdout.fileno(), stderr.fileno(), program=program)

    monkeypatch.setattr(pytester, "popen", popen)


_LONGEST = ("matrix", "gates", "compare", "remote", "plugin", "models", "docs", "test_core.py", "test_structure.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: at the end, one worker of pytest-xdist would have it, and the others nothing.

    A test without a mark gets eight devices, so that other workers have the rest.
    """
    here = Path(__file__).parent
    for item in items:
        ours = isinstance(item, pytest.Function) and here in item.path.parents  # and no check of the packaged suite
        if ours and needs_of(item) in (Needs("parent", 0), Needs("node", 0)):
            item.add_marker(pytest.mark.gpus(8))
    items.sort(key=lambda item: not any(here / name in (item.path, *item.path.parents) for name in _LONGEST))


def pytest_collection_finish() -> None:
    """End what `pytest_configure` has begun: tests and modules stay, and no collection is to look at them again."""
    freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # takes two fifths of the time of collecting thousands of tests, and finds almost nothing
    # Shells start background jobs with SIGINT ignored, which the processes that tests interrupt would inherit.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests with the fixture `ranks` have simulated devices, enough for three workers. Not in the ini file, which holds
    # for the examples, too: those may run on real ones.
    if config.inipath == INI and config.option.gpus is None:
        config.option.gpus, config.option.simulate = "16", "cpu"

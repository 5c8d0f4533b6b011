"""Runs the inner tests of each situation once, in processes of their own, and hands out what they wrote down."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from tests.conftest import processes_with
from tests.warm import Forked, Template

INNER = Path(__file__).parent / "inner"
TIMEOUT = 2
MARK = "MGPU_MATRIX_RUN"
LONGEST = 600
MANAGER_WITHIN = 20.0

ARGUMENTS = {
    "body": ("in_body.py", "--gpus=3"),
    "setup": ("in_setup.py", "--gpus=3"),
    "teardown": ("in_teardown.py", "--gpus=3"),
    "shrinking": ("in_shrinking.py", "--gpus=3"),
    "idle": ("while_idle.py", "--gpus=3"),
    "between": ("between_tests.py", "--gpus=3"),
    # Enough devices for a test on each worker.
    "xdist": ("in_body.py", "--gpus=6", "-n", "2", "--dist=loadgroup"),
}


@dataclass
class Row:
    """The result of one fault.

    Attributes:
        phases: function of the inner module, and phase -> what was written down of it.
    """

    phases: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    @property
    def red(self) -> list[tuple[str, str]]:
        """Where it was told."""
        return [where for where, report in self.phases.items() if report["outcome"] != "passed"]


@dataclass
class Run:
    """One inner run.

    Attributes:
        rows: by name of the fault.
        kinds: name -> kind of all faults that there are.
        take_longer: those that may take longer than the deadline of the others.
        deaths, remarks: the lines of the plugin at the end of a run.
        code: exit code.
        survivors: processes of it that were there when it had ended.
        names: of shared memory and semaphores of it that were there then.
    """

    rows: dict[str, Row]
    kinds: dict[str, str]
    take_longer: list[str]
    deaths: list[str]
    remarks: list[str]
    code: int
    survivors: list[str]
    names: list[str]


def _read(record: Path, code: int, survivors: list[str], names: list[str]) -> Run:
    rows: dict[str, Row] = {}
    end: dict[str, Any] = {"kinds": {}, "take_longer": [], "deaths": [], "remarks": []}
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        if entry["function"] == "run":
            end = entry
        else:
            rows.setdefault(entry["name"], Row()).phases[entry["function"], entry["when"]] = entry
    return Run(rows, end["kinds"], end["take_longer"], end["deaths"], end["remarks"], code, survivors, names)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MANAGER_WITHIN
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _run(situation: str, names: Sequence[str] | None, directory: Path, template: Template | None) -> Run:
    module, *options = ARGUMENTS[situation]
    mark = uuid.uuid4().hex
    record = directory / f"{situation}.jsonl"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MGPU_", "PYTEST_")) and name != "CI"
    }
    shared = directory / f"{situation}.names"
    shared.touch()
    environment |= {"PYTHONPATH": str(INNER), MARK: mark, "MGPU_MATRIX_NAMES": str(shared)}
    common = ["--simulate", f"--rank-timeout={TIMEOUT}", "--hypothesis-seed=0", f"--record={record}"]
    common += [f"--basetemp={directory / situation}"]
    if names is not None:
        common += [f"--names={','.join(names)}"]
    with (directory / f"{situation}.txt").open("w+") as output:
        arguments = [module, *options, *common]
        process: subprocess.Popen[bytes] | Forked
        if template is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments],
                cwd=INNER,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            # One more than a run needs: a fault kills a fork server.
            standbys = 3 if "-n" in options else 2
            file = output.fileno()
            process = template.popen(arguments, environment, file, file, standbys=standbys, directory=INNER)
        try:
            code = process.wait(LONGEST)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        # Torch's manager of shared memory stays for 2 s after those that it has it for.
        _await(lambda: "torch_shm_manag" not in processes_with(MARK, mark).values())
        survivors = [f"{name} ({pid})" for pid, name in processes_with(MARK, mark).items()]
        output.seek(0)
        assert record.exists(), output.read()
    names = [name for name in shared.read_text().split() if Path("/dev/shm", name).exists()]
    return _read(record, code, survivors, names)


class Situations:
    """The inner runs, each when it is first asked for, and together with those that will be."""

    def __init__(
        self, directory: Path, template: Template | None, shared: bool, wanted: Mapping[str, Sequence[str]]
    ) -> None:
        """
        Args:
            template: what runs are forked from; None to start interpreters.
            shared: other processes of this run use the same directory.
            wanted: situation -> the faults that are asked for; a situation without any is run with all of them.
        """
        self.wanted = {situation: names for situation, names in wanted.items() if names}
        self._directory = directory
        self._template = template
        self._shared = shared
        # Ranks that hang cost time and no processor, so that three runs take little longer than one.
        self._threads = ThreadPoolExecutor(3)
        self._runs: dict[str, Future[Run]] = {}

    def __getitem__(self, situation: str) -> Run:
        for name in (situation, *self.wanted):
            if name not in self._runs:
                self._runs[name] = self._threads.submit(self._once if self._shared else self._fresh, name)
        return self._runs[situation].result()

    def _fresh(self, situation: str) -> Run:
        return _run(situation, self.wanted.get(situation), self._directory, self._template)

    def _once(self, situation: str) -> Run:
        """By one of the processes that share the directory; the others read what it has left."""
        with (self._directory / f"{situation}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self._directory / f"{situation}.done"
            if done.exists():
                return _read(self._directory / f"{situation}.jsonl", *json.loads(done.read_text()))
            run = self._fresh(situation)
            done.write_text(json.dumps([run.code, run.survivors, run.names]))
            return run

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def situations(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, template: Template
) -> Iterator[Situations]:
    directory = tmp_path_factory.getbasetemp()
    shared = hasattr(request.config, "workerinput")
    if shared:
        directory = directory.parent / "matrix"
        directory.mkdir(exist_ok=True)
    cases = [item.callspec.params for item in request.session.items if _is_a_fault(item)]
    wanted: dict[str, list[Any]] = {
        name: [case["name"] for case in cases if case["situation"] == name] for name in ARGUMENTS
    }
    situations = Situations(directory, None if request.config.getoption("cold") else template, shared, wanted)
    yield situations
    situations.close()


def _is_a_fault(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and item.originalname == "test_fault" and item.path.parent == INNER.parent

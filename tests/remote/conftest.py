"""Runs beyond one machine, as a launcher starts them: several processes at once; none may survive."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mgpu_check.engine.remote.connections import Connections
from mgpu_check.engine.remote.credentials import Key, new_secret
from mgpu_check.engine.remote.meeting import listen_at
from tests.conftest import processes_with as started_with
from tests.warm import STANDBYS_OF_LAUNCHED, Forked, Template

MARK = "MGPU_TEST_LAUNCH"
KEY_FILE = "MGPU_CHECK_AGENT_KEY_FILE"
_TIMEOUT = 240.0
_REPLACED = re.compile(
    r"MGPU_CHECK_|PYTEST_|SLURM_|TORCHELASTIC_|(LOCAL_|GROUP_|NODE_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|CI$"
)


def processes_with(value: str) -> list[int]:
    """Processes that were started with `value` in the variable that marks a launch."""
    return list(started_with(MARK, value))


def wait_for_the_end_of(pids: Sequence[int], timeout: float) -> None:
    """Wait until all `pids` have ended."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(fd)


def free_port() -> int:
    """Return a port that stays free: outside of the range from which Linux gives ports to other sockets meanwhile."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(frozen=True)
class Run:
    """The result of a launch.

    Attributes:
        codes: exit codes of what was launched.
        output: standard output and error of all, one after the other.
        verdicts: test -> "passed", "failed", "error" or "skipped", from the JUnit file.
        texts: test -> what is said of its failure.
    """

    codes: list[int]
    output: str
    verdicts: dict[str, str]
    texts: dict[str, str]


class Launch:
    """Processes that were launched together."""

    def __init__(
        self,
        directory: Path,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        template: Template | None = None,
        *,
        standbys: int = STANDBYS_OF_LAUNCHED,
        imports: Sequence[str] = (),
    ) -> None:
        """
        Args:
            commands: each with the variables that it has besides those of this process.
            template: what they are forked from, all of them ``python -m …``; None to start interpreters.
            standbys: how many of the processes that each starts are forked; `imports`: what they have imported.
        """
        self.directory = directory
        self.value = uuid.uuid4().hex
        base = {name: value for name, value in os.environ.items() if not _REPLACED.match(name)}
        self.logs = [directory / f"log-{self.value}-{index}" for index in range(len(commands))]
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        for (command, variables), log in zip(commands, self.logs, strict=True):
            environment = {**base, MARK: self.value, KEY_FILE: str(directory / "agent-key"), **variables}
            with log.open("wb") as output:
                self.processes.append(
                    template.popen(
                        command[3:],
                        environment,
                        output.fileno(),
                        output.fileno(),
                        program=command[1:3],
                        standbys=standbys,
                        imports=imports,
                        directory=directory,
                    )
                    if template is not None
                    else subprocess.Popen(
                        command,
                        cwd=directory,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )

    def wait(self) -> Run:
        """Wait for the end of all; nothing may survive them."""
        deadline = time.monotonic() + _TIMEOUT
        late = False
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
        # The driver is in a session of its own, and may report for a moment when its launcher was killed.
        wait_for_the_end_of([] if late else processes_with(self.value), 15.0)
        survivors = processes_with(self.value)
        for pid in survivors:
            os.kill(pid, signal.SIGKILL)
        codes = [process.wait() for process in self.processes]
        output = "\n".join(log.read_text(errors="replace") for log in self.logs)
        assert not late, f"it did not end within {_TIMEOUT:g} s:\n{output}"
        assert survivors == [], f"processes have survived the run:\n{output}"
        verdicts, texts = _junit(self.directory / "result.xml")
        return Run(codes, output, verdicts, texts)


def _junit(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    verdicts: dict[str, str] = {}
    texts: dict[str, str] = {}
    if path.exists():
        for case in ElementTree.parse(path).iter("testcase"):
            name = case.attrib.get("name", "")  # none of a test in which the run was interrupted
            bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
            verdicts[name] = {"failure": "failed"}.get(bad[0].tag, bad[0].tag) if bad else "passed"
            texts[name] = "\n".join(f"{child.attrib.get('message', '')}\n{child.text or ''}" for child in bad)
    return verdicts, texts


TORCHRUN = "torch.distributed.run"
PYTEST = ("-m", "mgpu_check", "pytest", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--junitxml=result.xml")


Torchrun = Callable[..., Launch]


@pytest.fixture(scope="session")
def torchrun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, template: Template) -> Torchrun:
    """Start a torchrun for each of `nodes`, each for as many of the ranks and with its variables, on the tests in `source`.

    It and the ranks are forked from where torch is imported; if `cold`, they are interpreters that import it
    themselves.
    """

    def start(
        source: str,
        *arguments: str,
        restarts: int = 0,
        nodes: Sequence[Mapping[str, str]] = ({}, {}),
        ranks: int = 4,
        cold: bool = False,
    ) -> Launch:
        directory = tmp_path_factory.mktemp("launch")
        (directory / "test_it.py").write_text(source)
        each = ranks // len(nodes)
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test")
        commands = []
        for variables in nodes:
            command = [
                *(sys.executable, "-m", TORCHRUN, f"--nnodes={len(nodes)}", f"--nproc-per-node={each}", *rendezvous),
                *("--local-addr=127.0.0.1", f"--max-restarts={restarts}", f"--log-dir={directory}"),
                *(*PYTEST, f"--gpus={ranks}", "--simulate", "test_it.py", *arguments),
            ]
            commands.append((command, {"OMP_NUM_THREADS": "1", **variables}))
        return Launch(
            directory,
            commands,
            None if cold or request.config.getoption("cold") else template,
            standbys=each * (1 + restarts),
            imports=[TORCHRUN],
        )

    return start


LaunchedBy = Callable[..., Launch]


@pytest.fixture
def launched_by(request: pytest.FixtureRequest, template: Template) -> LaunchedBy:
    """Start one process for each of `variables`, as a launcher does that sets them, on the tests in `source`."""

    def start(variables: Sequence[Mapping[str, str]], source: str, directory: Path, *arguments: str) -> Launch:
        (directory / "test_it.py").write_text(source)
        command = [sys.executable, *PYTEST, "--simulate", "test_it.py", *arguments]
        commands = [(command, {"OMP_NUM_THREADS": "1", **own}) for own in variables]
        return Launch(directory, commands, None if request.config.getoption("cold") else template)

    return start


KEY = Key(new_secret(), "this test")


@pytest.fixture
def connections() -> Iterator[Connections]:
    """The driver's side of the connections, for two agents."""
    one = Connections(listen_at("127.0.0.1"), KEY, size=2, parent=None, patience=30.0)
    one.start()
    yield one
    one.finish(0)

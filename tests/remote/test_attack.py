"""Another user of the same machine, who can reach every port of a run, and reads and writes its store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.remote import attacker
from tests.remote.conftest import LaunchedBy, Node, Torchrun, free_port
from tests.remote.test_torchrun import ORDER, wait_until_begun

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")

UNDER_ATTACK = (
    ORDER
    + """
SHOWN = ["MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"]


def shown(rank):
    agent = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]
    variables = open(f"/proc/{agent}/environ").read().split("\\0")
    return {name: value for name, _, value in (each.partition("=") for each in variables) if name in SHOWN}


def test_under_attack(ranks):
    with open("begun-draft", "w") as file:
        json.dump(ranks.run(shown)[0], file)
    os.rename("begun-draft", "begun")
    for _ in range(1200):
        if os.path.exists("attacked"):
            break
        time.sleep(0.1)
    # New ranks, with connections of their own.
    assert ranks.run(total, size=1) == [1.0]
    assert ranks.run(total) == [3.0, 3.0]
"""
)


def attack(what: str, **told: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.remote.attacker", what, json.dumps(told)],
        cwd=Path(attacker.__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def public(directory: Path) -> Path:
    """A directory for the mark that a successful attacker leaves."""
    directory.mkdir()
    directory.chmod(0o777)
    for one in directory.parents:
        if one != Path("/tmp") and one.stat().st_uid == os.geteuid() and not one.stat().st_mode & 0o001:
            one.chmod(one.stat().st_mode | 0o001)
    return directory / "marker"


@pytest.mark.slow  # test_hub.py has strangers each day
def test_nobody_joins_by_what_stands_in_the_store(tmp_path: Path, torchrun: Torchrun):
    marker = public(tmp_path / "public")
    launch = torchrun(UNDER_ATTACK, nodes=[Node()], ranks=2)
    wait_until_begun(launch)
    variables = json.loads((launch.directory / "begun").read_text())
    try:
        process = attack(
            "join",
            port=int(variables["MASTER_PORT"]),
            key_file=str(launch.directory / "agent-key"),
            marker=str(marker),
            variables=variables,
        )
        found = json.loads(process.communicate(timeout=120.0)[0])
        listening = listeners(found["store"])
    finally:
        (launch.directory / "attacked").touch()
    run = launch.wait()
    assert found["user"] == attacker.NOBODY and found["key file"] == "PermissionError"
    # The attack has reached the driver: it was greeted each time, and never told more.
    assert len(found["heard"]) > 8 and found["believed"] == 0
    assert {text[:26] for text in found["heard"] if text} <= {b"mgpu-check/2\n".hex()}
    assert all(len(text) <= 90 for text in found["heard"])
    assert not marker.exists()
    key = (launch.directory / "agent-key").read_text().strip()
    assert re.fullmatch("[0-9a-f]{64}", key) and key not in found["store"]
    assert listening == ["127.0.0.1"]  # as does the launcher's endpoint
    assert run.verdicts == {"test_under_attack": "passed"} and run.codes == [0], run.output
    assert "refused a process at 127.0.0.1 that wanted to join with another key" in run.output


def listeners(said: str) -> list[str]:
    """Return the addresses with a listener on the port that is announced in the store."""
    port = json.loads(json.loads(said)["said"])["port"]
    with open("/proc/net/tcp") as v4, open("/proc/net/tcp6") as v6:
        lines = [line.split() for line in [*v4.readlines()[1:], *v6.readlines()[1:]]]
    found = [words[1].partition(":") for words in lines if words[3] == "0A"]
    return [".".join(str(b) for b in bytes.fromhex(at)[::-1]) for at, _, number in found if int(number, 16) == port]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (None, "another key than the one in .*agent-key"),
        ("yes", "was started with --trust-network, and this process without it"),
    ],
    ids=["a driver of their own", "with its key in the store"],
)
def test_nobody_commands_an_agent(secret: str | None, words: str, tmp_path: Path, launched_by: LaunchedBy):
    marker = public(tmp_path / "public")
    port = free_port()
    process = attack("command", port=port, marker=str(marker), secret=secret)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = launched_by([variables], "", tmp_path, "--gpus=2").wait()
    found = json.loads(process.communicate("\n", timeout=60.0)[0])
    assert found["user"] == attacker.NOBODY
    assert run.codes == [4] and re.search(words, run.output), run.output
    assert found["obeyed"] == "" and not marker.exists()
